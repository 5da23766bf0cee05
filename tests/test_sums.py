"""Fits by many processes are the fit by one."""

import os
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.special import entr
from torch.testing import assert_close
from torch.utils.data import DataLoader
from transformers import BertForTokenClassification

from laplace_lora_ext.likelihoods import LIKELIHOODS, MULTI_LABEL, TOKENS
from laplace_lora_ext.sums import Seen
from tests.support.dense import full_rank, labels_of
from tests.support.models import (
    base_model,
    first_batch,
    head_of,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import KFAC_APPROX, STRUCTURES, make
from tests.support.ranks import (
    Texts,
    assert_alike,
    failures,
    on_ranks,
    strided_loader,
)
from tests.support.snapshots import facts_of

# Sums of the same numbers in another order, through eigendecompositions.
CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def posterior(
    structure: str = "lowrank_kron",
    kfac_approx: str = "gradient",
):
    """Make a posterior whose factors lose nothing, whatever the order of the data."""
    keywords = full_rank(structure, kfac_approx=kfac_approx)
    # A prior so broad that the curvature counts.
    return make(lora_model("bert"), structure, prior_precision=1e-3, **keywords)


def facts(la) -> dict[str, torch.Tensor]:
    batch = first_batch()
    return facts_of(la, batch)


def fitted_on(loader, *settings: str) -> dict[str, torch.Tensor]:
    """Fit a posterior; tell what it comes to."""
    la = posterior(*settings)
    la.fit(loader)
    return facts(la)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "n",
    [
        pytest.param(12, id="as many for each"),
        pytest.param(11, id="one repeated"),
        # The sampler gives one of three ranks nothing but a repetition.
        pytest.param(2, id="two texts"),
    ],
)
def test_every_rank_has_the_posterior_of_one_process(structure, world, n):
    def job(_=0):
        return fitted_on(strided_loader(n), structure)

    assert_alike(on_ranks(job, world), job(), **CLOSE)


def with_head(structure: str):
    return make(
        lora_model("bert"),
        structure,
        modules_to_save=True,
        **full_rank(structure),
    )


def with_embedding(structure: str):
    model = lora_model("bert", target_modules=["word_embeddings", "query"])
    return make(model, structure, **full_rank(structure))


@pytest.mark.filterwarnings("ignore:.*no linear layer")
@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
@pytest.mark.parametrize("build", [with_head, with_embedding])
# Of two texts, one of three ranks has but a repetition.
@pytest.mark.parametrize("n", [11, 2])
def test_heads_and_other_matrices_are_summed_over_ranks(build, structure, n):
    def job(_=0):
        la = build(structure)
        la.fit(strided_loader(n))
        return facts(la)

    assert_alike(on_ranks(job, 3), job(), **CLOSE)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_shards_of_any_size(kfac_approx):
    batches = ragged_batches(batch_size=1)
    shards = [batches[:5], [], batches[5:]]

    def job(rank):
        return fitted_on(shards[rank], "lowrank_kron", kfac_approx)

    expected = fitted_on(batches, "lowrank_kron", kfac_approx)
    assert_alike(on_ranks(job, 3), expected, **CLOSE)


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


def a_loader_that_breaks() -> Iterator[dict]:
    yield from ragged_batches(lengths=(7, 4))
    raise OSError("disk is gone")


def a_batch_without_labels() -> Iterator[dict]:
    yield from ragged_batches(lengths=(7, 4))
    yield {"input_ids": torch.zeros(1, 3).long()}


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (a_loader_that_breaks, "OSError", "disk is gone"),
        (a_batch_without_labels, "ValueError", "batch 1: No labels 'labels' in the"),
    ],
)
def test_a_rank_that_fails_stops_all_and_nothing_is_lost(broken, error, message):
    def job(rank):
        la = posterior()
        la.fit(strided_loader())
        before = facts(la)
        loader = broken() if rank == 1 else strided_loader()
        try:
            la.fit(loader)
        except Exception as failure:
            assert_close(facts(la), before, rtol=0, atol=0)
            # And they can go on.
            la.fit(strided_loader())
            return failure
        return None

    first, second, third = failures(on_ranks(job, 3))
    assert second.startswith(message)
    assert first.startswith(f"Rank 1 failed. {error}: {message}")
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
        # In other batches, which makes no difference.
        batch_size = 3 if rank else 2
        posterior().fit(ragged_batches(batch_size=batch_size))

    refusal = "Ranks 0 and 1 have the same 8 examples: give each rank its own shard"
    for message in failures(on_ranks(job, 2)):
        assert refusal in message


@pytest.mark.parametrize("differing", ["LoRA weights", "base or head", "settings"])
def test_ranks_with_other_models_are_refused(differing):
    def job(rank):
        kfac_approx = "gradient"
        if differing == "settings":
            kfac_approx = KFAC_APPROX[rank]
        la = posterior("lowrank_kron", kfac_approx)
        if differing == "LoRA weights":
            la.blocks[2].weight.data += rank
        elif differing == "base or head":
            bert = la.model.model.base_model.model.bert
            bert.pooler.dense.bias.data += rank
        la.fit(strided_loader())

    for message in failures(on_ranks(job, 2)):
        assert f"Rank 1 and rank 0 differ in {differing}: load" in message


def messages_of(
    caught: list[warnings.WarningMessage],
    about: str,
) -> list[str]:
    """Find the warnings that have some words."""
    messages = [str(warning.message) for warning in caught]
    return [message for message in messages if about in message]


def test_ranks_with_a_part_of_the_data_set_each_are_not_warned():
    def job(_):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            posterior().fit(strided_loader(11))
        return messages_of(caught, "data set")

    assert on_ranks(job, 2) == [[], []]


def test_a_sampler_that_leaves_examples_out_is_warned_of():
    loader = DataLoader(Texts(4), sampler=range(3))
    message = "gave 3 examples, but its data set has 4"
    with pytest.warns(UserWarning, match=message):
        posterior().fit(loader)


def test_progress_is_shown_by_one_rank(capfd):
    def job(_):
        posterior().fit(strided_loader(), progress_bar=True)

    capfd.readouterr()
    assert on_ranks(job, 2) == [None, None]
    assert capfd.readouterr().err.count("| 0/6 [") == 1


# --- no better than guessing ----------------------------------------------------------


def said_by_a_fit(
    model: nn.Module,
    batches: list[dict],
    **options,
) -> list[str]:
    """Fit a posterior; return what is said of guesses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(model, **options).fit(batches)
    return messages_of(caught, "no better than guessing")


@torch.no_grad()
def logits_of(
    model: nn.Module,
    batch: dict,
) -> torch.Tensor:
    return model.eval()(**without_labels(batch)).logits


def with_right_labels(
    model: nn.Module,
    batches: list[dict],
    n_right: int,
) -> list[dict]:
    """Label the first texts as the model does, and all others wrongly."""
    relabelled = []
    n_before = 0
    for batch in batches:
        likeliest = logits_of(model, batch).argmax(-1)
        places = n_before + torch.arange(len(likeliest))
        n_before += len(likeliest)
        wrong = (likeliest + 1) % 3
        labels = torch.where(places < n_right, likeliest, wrong)
        relabelled.append(batch | {"labels": labels})
    return relabelled


def scaled_head(factor: float) -> nn.Module:
    """Make a classifier without a bias, whose logits are so many times as large."""
    model = lora_model("bert")
    head = head_of(model)
    with torch.no_grad():
        head.weight.mul_(factor)
        head.bias.zero_()
    return model


def eighteen_texts() -> list[dict]:
    # So many that their loss is told from that of a guess.
    return ragged_batches(lengths=[2, 3, 4, 5, 6, 7] * 3)


def test_an_adapter_without_its_head_is_warned_of_once():
    # As small as a new one's.
    model = scaled_head(1e-3)
    batches = eighteen_texts()
    (message,) = said_by_a_fit(model, batches)
    assert "its loss is 1.098" in message
    assert said_by_a_fit(model, batches, structure="diag") == [message]
    labels = labels_of(batches)
    frequencies = labels.bincount().double() / len(labels)
    entropy_of_labels = entr(frequencies).sum().item()
    assert f"would be {entropy_of_labels:.4f} without" in message


@pytest.mark.parametrize(
    ("n_right", "n_warnings"),
    [
        pytest.param(18, 0, id="and right"),
        pytest.param(6, 1, id="and wrong of two in three"),
    ],
)
def test_a_model_that_is_sure(n_right, n_warnings):
    model = scaled_head(10)
    batches = with_right_labels(model, eighteen_texts(), n_right)
    assert len(said_by_a_fit(model, batches)) == n_warnings


def test_one_class_is_no_guess():
    batches = ragged_batches()
    for batch in batches:
        batch["labels"].zero_()
    assert said_by_a_fit(lora_model("bert"), batches) == []


def test_numbers_are_no_guesses():
    batches = ragged_batches()
    for batch in batches:
        batch["labels"] = batch["labels"][:, None].expand(-1, 3)
    said = said_by_a_fit(lora_model("bert"), batches, likelihood="regression")
    assert said == []


def test_rewards_are_compared_with_a_coin():
    model = lora_model("bert", n_labels=1)
    (batch,) = ragged_batches(batch_size=8)
    order = logits_of(model, batch).flatten().argsort()
    worse = order[:4]
    better = order[4:]

    def said_of(chosen, rejected):
        # As in TRL's batches.
        rows = torch.cat([chosen, rejected])
        inputs = without_labels(batch)
        pairs = {key: column[rows] for key, column in inputs.items()}
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


SEVERAL_LABELS = torch.tensor(
    [
        [1.0, 0, 1],
        [0, 0, 1],
        [0, 0, 1],
        [0, 0, 0],
    ]
)
LABELS_OF_TOKENS = torch.tensor(
    [
        [0, 1, -100, 1],
        [2, -100, -100, 1],
    ]
)


def entropy(*counts: int) -> float:
    """Sum the entropy of so many labels of each class over all labels, in nats."""
    n_labels = sum(counts)
    shares = torch.tensor(counts).double() / n_labels
    of_one = entr(shares).sum().item()
    return n_labels * of_one


@pytest.mark.parametrize(
    ("likelihood", "y", "expected"),
    [
        pytest.param(
            "classification",
            torch.tensor([0, 2, 2, 2]),
            entropy(1, 3),
            id="classes",
        ),
        pytest.param(
            "classification",
            torch.tensor([2, 2]),
            0,
            id="one class",
        ),
        # A coin, whichever of two texts is said to be preferred.
        pytest.param(
            "reward_modeling",
            torch.tensor([0, 0, 0]),
            entropy(1, 1) * 3 / 2,
            id="rewards",
        ),
        pytest.param(
            MULTI_LABEL,
            SEVERAL_LABELS,
            entropy(1, 3) + entropy(4, 0) + entropy(3, 1),
            id="several labels",
        ),
        pytest.param(
            MULTI_LABEL,
            SEVERAL_LABELS[:, 0],
            entropy(1, 3),
            id="a single label",
        ),
        # A negative label counts for nothing.
        pytest.param(
            TOKENS,
            LABELS_OF_TOKENS,
            entropy(1, 3, 1),
            id="labels of tokens",
        ),
        pytest.param(
            "language_modeling",
            LABELS_OF_TOKENS,
            0,
            id="next tokens",
        ),
        pytest.param(
            "regression",
            SEVERAL_LABELS,
            0,
            id="numbers",
        ),
    ],
)
def test_the_loss_of_chance_is_the_entropy_of_each_kind_of_labels(
    likelihood, y, expected
):
    def seen(labels):
        return Seen.of(LIKELIHOODS[likelihood], labels, [])

    at_once = seen(y)
    in_parts = seen(y[:1]) + seen(y[1:])
    for found in (at_once, in_parts):
        assert found.loss_of_chance() == pytest.approx(expected, abs=1e-12)


@dataclass(frozen=True)
class Learnt:
    """A model that is sure of the labels of its texts, and right."""

    model: nn.Module
    batches: list[dict]


@torch.no_grad()
def of_several_labels() -> Learnt:
    """Make a model that has learnt which of three labels its texts have."""
    model = lora_model("bert")
    batches = ragged_batches()
    head = head_of(model)
    scores = torch.cat([logits_of(model, batch) for batch in batches])
    # Half of the texts have each label.
    head.bias.sub_(scores.median(0).values)
    head.weight.mul_(100)
    head.bias.mul_(100)
    for batch in batches:
        has_label = logits_of(model, batch) > 0
        batch["labels"] = has_label.double()
    return Learnt(model, batches)


@torch.no_grad()
def of_tokens() -> Learnt:
    """Make a model that has learnt the labels of its texts' first two tokens."""
    torch.manual_seed(0)
    base = BertForTokenClassification(base_model("bert").config)
    lora = LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    model = get_peft_model(base, lora).double()
    model.base_model.model.classifier.weight.mul_(1e4)
    batches = ragged_batches()
    for batch in batches:
        labels = logits_of(model, batch).argmax(-1)
        labels[:, 2:] = -100
        batch["labels"] = labels
    return Learnt(model, batches)


def with_labels_of_the_next(batches: list[dict]) -> list[dict]:
    """Give each text the labels of the one behind it."""
    shuffled = labels_of(batches).roll(-1, 0)
    n_texts = [len(batch["labels"]) for batch in batches]
    relabelled = []
    for batch, labels in zip(batches, shuffled.split(n_texts), strict=True):
        relabelled.append(batch | {"labels": labels})
    return relabelled


LEARNT = {MULTI_LABEL: of_several_labels, TOKENS: of_tokens}


@pytest.mark.parametrize("likelihood", LEARNT)
def test_learnt_labels_are_not_warned_of(likelihood):
    learnt = LEARNT[likelihood]()
    said = said_by_a_fit(learnt.model, learnt.batches, likelihood=likelihood)
    assert said == []


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
@pytest.mark.parametrize("likelihood", LEARNT)
def test_shuffled_labels_are_warned_of(likelihood, structure):
    learnt = LEARNT[likelihood]()
    shuffled = with_labels_of_the_next(learnt.batches)
    (message,) = said_by_a_fit(
        learnt.model,
        shuffled,
        likelihood=likelihood,
        structure=structure,
    )
    labels = labels_of(learnt.batches)
    chance = Seen.of(LIKELIHOODS[likelihood], labels, []).loss_of_chance()
    n_texts = len(labels)
    assert f"would be {chance / n_texts:.4f} without" in message


def test_ranks_count_several_labels_and_tokens_of_all():
    def job(rank, world):
        said = []
        for likelihood, build in LEARNT.items():
            learnt = build()
            own = with_labels_of_the_next(learnt.batches)[rank::world]
            said.append(said_by_a_fit(learnt.model, own, likelihood=likelihood))
        return said

    expected = job(0, 1)
    assert [len(messages) for messages in expected] == [1, 1]
    assert on_ranks(job, 2, 2) == [expected] * 2
