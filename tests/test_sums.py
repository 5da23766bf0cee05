"""Fits by many processes are the fit by one."""

import os
import signal
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertForTokenClassification

from laplace_lora_ext.likelihoods import LIKELIHOODS, MULTI_LABEL, TOKENS
from laplace_lora_ext.sums import Seen
from tests.support.models import base_model, lora_model, ragged_batches, without_labels
from tests.support.posteriors import KFAC_APPROX, STRUCTURES, make
from tests.support.ranks import (
    Texts,
    assert_alike,
    failures,
    on_ranks,
    strided_loader,
)

EVERYTHING = 100  # a rank above every size, so that nothing is cut
CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def posterior(
    structure: str = "lowrank_kron",
    kfac_approx: str = "gradient",
    kind: str = "bert",
):
    keywords = {"prior_precision": 1e-3}
    if structure == "lowrank_kron":
        keywords["backend_kwargs"] = {
            "rank": EVERYTHING,
            "kfac_approx": kfac_approx,
        }
    return make(lora_model(kind), structure, **keywords)


def facts(la) -> tuple[torch.Tensor, ...]:
    """What a fit comes to."""
    precision = la.posterior_precision
    return (
        precision.to_matrix() if hasattr(precision, "to_matrix") else la.H,
        la.log_marginal_likelihood().detach(),
        la.loss,
        torch.tensor(la.n_data),
        la(ragged_batches()[0]),
    )


def fitted_on(loader, *settings):
    la = posterior(*settings)
    la.fit(loader)
    return facts(la)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_has_the_posterior_of_one_process(structure, world):
    def job(rank, n):
        return fitted_on(strided_loader(n), structure)

    for n in (
        12,
        11,
        2,
    ):  # two texts leave one of three ranks nothing but a repetition
        assert_alike(on_ranks(job, world, n), job(0, n), **CLOSE)


@pytest.mark.filterwarnings("ignore:.*no linear layer")
@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
@pytest.mark.parametrize("trained", ["head", "embedding"])
def test_heads_and_other_matrices_are_summed_over_ranks(trained, structure):
    options = {"backend_kwargs": {"rank": EVERYTHING}}
    if structure == "full":
        options = {}

    def job(rank, n):
        if trained == "head":
            model = lora_model("bert")
        else:
            model = lora_model("bert", target_modules=["word_embeddings", "query"])
        la = make(model, structure, modules_to_save=trained == "head", **options)
        la.fit(strided_loader(n))
        return facts(la)

    for n in (11, 2):  # of three ranks, one has but a repetition
        assert_alike(on_ranks(job, 3, n), job(0, n), **CLOSE)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_shards_of_any_size(kfac_approx):
    batches = ragged_batches(batch_size=1)
    shards = [batches[:5], [], batches[5:]]

    def fit(loader):
        return fitted_on(loader, "lowrank_kron", kfac_approx)

    results = on_ranks(lambda rank: fit(shards[rank]), 3)
    assert_alike(results, fit(batches), **CLOSE)


def test_data_are_added_to_those_of_the_last_fit():
    def job(_=0):
        la = posterior()
        la.fit(strided_loader(7))
        la.fit(strided_loader(11), override=False)
        return facts(la)

    assert_alike(on_ranks(job, 2), job(), **CLOSE)


def test_no_data_on_any_rank():
    results = on_ranks(lambda _: posterior().fit([]), 2)
    for said in failures(results):
        assert said.startswith("The training loader has no data.")


@pytest.mark.parametrize("where", ["loader", "batch"])
def test_a_rank_that_fails_stops_all_and_nothing_is_lost(where):
    def broken():
        yield from ragged_batches()[:1]
        if where == "loader":
            raise OSError("disk is gone")
        yield {"input_ids": torch.zeros(1, 3).long()}

    def job(rank):
        la = posterior()
        la.fit(strided_loader())
        before = facts(la)
        try:
            la.fit(broken() if rank == 1 else strided_loader())
        except Exception as error:
            torch.testing.assert_close(facts(la), before, rtol=0, atol=0)
            la.fit(strided_loader())  # and they can go on
            return error
        return None

    message = (
        "disk is gone"
        if where == "loader"
        else "batch 1: No labels 'labels' in the batch"
    )
    first, second, third = failures(on_ranks(job, 3))
    assert second.startswith(message)
    kind = "OSError" if where == "loader" else "ValueError"
    assert first.startswith(f"Rank 1 failed. {kind}: {message}")
    assert third == first


def test_a_rank_whose_model_has_changed_stops_all():
    def job(rank):
        la = posterior()
        la.fit(strided_loader())
        if rank == 1:
            la.blocks[0].weight.data.mul_(2)
        la.fit(strided_loader(), override=False)

    first, second, third = failures(on_ranks(job, 3))
    assert "have changed since the fit" in second
    assert first.startswith(f"Rank 1 failed. RuntimeError: {second}")
    assert third == first


def test_a_rank_that_is_killed_leaves_no_other_waiting():
    def job(rank):
        la = posterior()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        la.fit(strided_loader())

    assert failures(on_ranks(job, 2))


def test_the_same_data_on_two_ranks_are_refused():
    def job(rank):
        la = posterior()
        la.fit(ragged_batches() if rank else ragged_batches(batch_size=2))

    for message in failures(on_ranks(job, 2)):
        assert (
            "Ranks 0 and 1 have the same 8 examples: give each rank its own shard"
            in message
        )


@pytest.mark.parametrize("differing", ["LoRA weights", "base or head", "settings"])
def test_ranks_with_other_models_are_refused(differing):
    def job(rank):
        la = posterior(
            "lowrank_kron",
            KFAC_APPROX[rank if differing == "settings" else 0],
        )
        if differing == "LoRA weights":
            la.blocks[2].weight.data += rank
        elif differing == "base or head":
            la.model.model.base_model.model.bert.pooler.dense.bias.data += rank
        la.fit(strided_loader())

    for message in failures(on_ranks(job, 2)):
        assert f"Rank 1 and rank 0 differ in {differing}: load" in message


def test_numbers_are_those_of_the_data_set():
    def job(_):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            posterior().fit(strided_loader(11))
        messages = [str(warning.message) for warning in caught]
        return [message for message in messages if "its data set" in message]

    assert on_ranks(job, 2) == [[], []]
    texts = Texts(4)
    loader = torch.utils.data.DataLoader(texts, sampler=range(3))
    with pytest.warns(
        UserWarning,
        match="gave 3 examples, but its data set has 4",
    ):
        posterior().fit(loader)


def test_progress_is_shown_by_one_rank(capfd):
    def job(_):
        posterior().fit(strided_loader(), progress_bar=True)

    capfd.readouterr()
    assert on_ranks(job, 2) == [None, None]
    assert capfd.readouterr().err.count("| 0/6 [") == 1


GUESSING = "no better than guessing"


def said_by_a_fit(model, batches, **options):
    """Warnings of guesses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(model, **options).fit(batches)
    messages = [str(warning.message) for warning in caught]
    return [message for message in messages if GUESSING in message]


def relabelled(model, batches, n_right):
    """Batches whose first labels are what a model gives the most probability."""
    model.eval()
    relabelled = []
    for batch in batches:
        with torch.no_grad():
            likeliest = model(**without_labels(batch)).logits.argmax(-1)
        is_right = torch.arange(len(likeliest)) < n_right
        n_right -= len(likeliest)
        labels = torch.where(is_right, likeliest, (likeliest + 1) % 3)
        relabelled.append(batch | {"labels": labels})
    return relabelled


def test_an_adapter_without_its_head_is_warned_of_once():
    model = lora_model("bert")
    head = model.base_model.model.classifier.modules_to_save.default
    batches = ragged_batches(lengths=[2, 3, 4, 5, 6, 7] * 3)
    with torch.no_grad():
        head.weight.mul_(1e-3)  # as a new one has it
        head.bias.zero_()
    (message,) = said_by_a_fit(model, batches)
    assert "its loss is 1.098" in message
    assert said_by_a_fit(model, batches, structure="diag") == [message]
    labels = torch.cat([batch["labels"] for batch in batches])
    frequencies = labels.bincount().double() / len(labels)
    entropy = torch.special.entr(frequencies).sum()
    assert f"would be {entropy:.4f} without" in message
    with torch.no_grad():
        head.weight.mul_(1e4)  # sure of what it says
    assert said_by_a_fit(model, relabelled(model, batches, 18)) == []
    assert len(said_by_a_fit(model, relabelled(model, batches, 6))) == 1


def test_one_class_and_numbers_are_no_guesses():
    model = lora_model("bert")
    alike = []
    numbers = []
    for batch in ragged_batches():
        labels = batch["labels"]
        alike.append(batch | {"labels": torch.zeros_like(labels)})
        numbers.append(batch | {"labels": labels[:, None].expand(-1, 3)})
    assert said_by_a_fit(model, alike) == []
    assert said_by_a_fit(model, numbers, likelihood="regression") == []


def test_rewards_are_compared_with_a_coin():
    model = lora_model("bert", n_labels=1)
    (batch,) = ragged_batches(batch_size=8)
    inputs = without_labels(batch)
    model.eval()
    with torch.no_grad():
        order = model(**inputs).logits.flatten().argsort()
    worse = order[:4]
    better = order[4:]

    def said_of(chosen, rejected):
        rows = torch.cat([chosen, rejected])  # as in TRL's batches
        pairs = {key: value[rows] for key, value in inputs.items()}
        return said_by_a_fit(model, [pairs], likelihood="reward_modeling")

    assert said_of(better, worse) == []
    (message,) = said_of(worse, better)
    assert "0.6931" in message


def test_ranks_compare_the_loss_of_all_with_the_labels_of_all():
    def job(_):
        return said_by_a_fit(lora_model("bert"), strided_loader())

    assert on_ranks(job, 2) == [job(0)] * 2
    assert len(job(0)) == 1


# --- chance, of several labels and of labels of tokens --------------------------------


LABELS = torch.tensor([[1.0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 0]])
OF_TOKENS = torch.tensor([[0, 1, -100, 1], [2, -100, -100, 1]])


def entropy(*counts: int) -> float:
    """In nats, summed over all that are counted."""
    shares = torch.tensor(counts).double() / sum(counts)
    return sum(counts) * torch.special.entr(shares).sum().item()


@pytest.mark.parametrize(
    ("likelihood", "y", "expected"),
    [
        ("classification", torch.tensor([0, 2, 2, 2]), entropy(1, 3)),
        ("classification", torch.tensor([2, 2]), 0),
        ("reward_modeling", torch.tensor([0, 0, 0]), entropy(1, 1) * 3 / 2),
        (MULTI_LABEL, LABELS, entropy(3, 1) + entropy(1, 3)),
        (MULTI_LABEL, LABELS[:, 0], entropy(3, 1)),
        (TOKENS, OF_TOKENS, entropy(1, 3, 1)),
        ("language_modeling", OF_TOKENS, 0),
        ("regression", LABELS, 0),
    ],
)
def test_the_loss_of_chance_is_the_entropy_of_each_kind_of_labels(
    likelihood, y, expected
):
    def seen(part):
        return Seen.of(LIKELIHOODS[likelihood], part, [])

    of_parts = seen(y[:1]) + seen(y[1:])
    for found in (seen(y), of_parts):
        assert found.loss_of_chance() == pytest.approx(expected, abs=1e-12)


def sure_of_several_labels() -> tuple[torch.nn.Module, list]:
    """A model that is sure of the labels of its texts, and right."""
    model = lora_model("bert").eval()
    head = model.base_model.model.classifier.modules_to_save.default
    batches = ragged_batches()
    with torch.no_grad():
        scores = torch.cat([model(**without_labels(each)).logits for each in batches])
        # Half of the texts have each label.
        head.bias.sub_(scores.median(0).values)
        head.weight.mul_(100)
        head.bias.mul_(100)
        for batch in batches:
            batch["labels"] = (model(**without_labels(batch)).logits > 0).double()
    return model, batches


def sure_of_tokens() -> tuple[torch.nn.Module, list]:
    """A model that is sure of the labels of its texts' first tokens, and right."""
    torch.manual_seed(0)
    base = BertForTokenClassification(base_model("bert").config)
    lora = LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    model = get_peft_model(base, lora).double().eval()
    batches = ragged_batches()
    with torch.no_grad():
        model.base_model.model.classifier.weight.mul_(1e4)
        for batch in batches:
            labels = model(**without_labels(batch)).logits.argmax(-1)
            labels[:, 2:] = -100
            batch["labels"] = labels
    return model, batches


def with_labels_of_the_next(batches: list) -> list:
    """Batches whose texts have the labels of those behind them."""
    labels = torch.cat([batch["labels"] for batch in batches]).roll(-1, 0)
    of_batches = labels.split([len(batch["labels"]) for batch in batches])
    pairs = zip(batches, of_batches, strict=True)
    return [batch | {"labels": of_batch} for batch, of_batch in pairs]


BUILDERS = {MULTI_LABEL: sure_of_several_labels, TOKENS: sure_of_tokens}


@pytest.mark.parametrize(("likelihood", "build"), BUILDERS.items(), ids=BUILDERS)
def test_shuffled_labels_are_warned_of_and_learnt_ones_are_not(likelihood, build):
    model, batches = build()
    assert said_by_a_fit(model, batches, likelihood=likelihood) == []
    shuffled = with_labels_of_the_next(batches)
    (message,) = said_by_a_fit(model, shuffled, likelihood=likelihood)
    labels = torch.cat([batch["labels"] for batch in batches])
    chance = Seen.of(LIKELIHOODS[likelihood], labels, []).loss_of_chance()
    # For each text.
    assert f"would be {chance / len(labels):.4f} without" in message
    for structure in ("diag", "full"):
        said = said_by_a_fit(
            model, shuffled, likelihood=likelihood, structure=structure
        )
        assert said == [message]


def test_ranks_count_several_labels_and_tokens_of_all():
    def job(rank, world):
        said = []
        for likelihood, build in BUILDERS.items():
            model, batches = build()
            own = with_labels_of_the_next(batches)[rank::world]
            said.append(said_by_a_fit(model, own, likelihood=likelihood))
        return said

    expected = job(0, 1)
    assert [len(messages) for messages in expected] == [1, 1]
    assert on_ranks(job, 2, 2) == [expected] * 2
