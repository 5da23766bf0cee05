"""Fits by many processes are the fit by one."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.special import entr
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler

from laplace_lora_ext.sums import Seen
from laplace_lora_ext.tasks import TASKS
from tests.support.dense import full_rank, labels_of
from tests.support.models import (
    Batch,
    first_batch,
    head_of,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import (
    KFAC_APPROX,
    make,
)
from tests.support.ranks import (
    Texts,
    assert_alike,
    failures,
    on_ranks,
    strided_loader,
)
from tests.support.snapshots import facts_of
from tests.support.tokens import token_classifier

MULTI_LABEL = "multi_label_classification"
TOKENS = "token_classification"

# Sums of the same numbers in another order, through eigendecompositions.
CLOSE = {
    "rtol": 1e-8,
    "atol": 1e-10,
}


def posterior(
    structure: str = "lowrank_kron",
    kfac_approx: str = "gradient",
):
    """Make a posterior whose factors lose nothing, whatever the order of the data."""
    keywords = full_rank(structure, kfac_approx=kfac_approx)
    return make(
        lora_model("bert"),
        structure,
        # So broad that the curvature counts.
        prior_precision=1e-3,
        **keywords,
    )


Facts = dict[str, Tensor]


def facts(la) -> Facts:
    batch = first_batch()
    return facts_of(la, batch)


def assert_as_one_process(job: Callable[..., Facts], n_ranks: int) -> None:
    """Check that all ranks come to what one process comes to with all data."""
    of_ranks = on_ranks(job, n_ranks)
    alone = job()
    assert_alike(of_ranks, alone, **CLOSE)


def fitted_on(loader, *settings: str) -> Facts:
    """Fit a posterior; tell what it comes to."""
    la = posterior(*settings)
    la.fit(loader)
    return facts(la)


@pytest.mark.parametrize(
    ("structure", "world", "n"),
    [
        # As many for each, then one repeated.
        ("lowrank_kron", 2, 12),
        ("lowrank_kron", 3, 11),
        # The sampler gives one of three ranks nothing but a repetition.
        ("lowrank_kron", 3, 2),
        ("kron", 2, 11),
        ("diag", 3, 2),
        ("full", 2, 11),
    ],
)
def test_every_rank_has_the_posterior_of_one_process(structure, world, n):
    def job(_=0):
        return fitted_on(strided_loader(n), structure)

    assert_as_one_process(job, world)


def with_head(structure: str):
    return make(
        lora_model("bert"),
        structure,
        modules_to_save=True,
        **full_rank(structure),
    )


def with_embedding(structure: str):
    of_embedding_and_layers = ["word_embeddings", "query"]
    model = lora_model("bert", target_modules=of_embedding_and_layers)
    settings = full_rank(structure)
    return make(model, structure, **settings)


@pytest.mark.filterwarnings("ignore:.*no linear layer")
@pytest.mark.parametrize(
    ("build", "structure", "n"),
    [
        (with_head, "lowrank_kron", 11),
        # Of two texts, one of three ranks has but a repetition.
        (with_embedding, "lowrank_kron", 2),
        (with_embedding, "full", 11),
    ],
)
def test_heads_and_other_matrices_are_summed_over_ranks(build, structure, n):
    def job(_=0):
        la = build(structure)
        la.fit(strided_loader(n))
        return facts(la)

    assert_as_one_process(job, 3)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_shards_of_any_size(kfac_approx):
    batches = ragged_batches(batch_size=1)
    most = batches[:5]
    none = []
    others = batches[5:]
    shards = [most, none, others]

    def job(rank):
        return fitted_on(shards[rank], "lowrank_kron", kfac_approx)

    of_ranks = on_ranks(job, 3)
    expected = fitted_on(batches, "lowrank_kron", kfac_approx)
    assert_alike(of_ranks, expected, **CLOSE)


def test_data_are_added_to_those_of_the_last_fit():
    def job(_=0):
        la = posterior()
        la.fit(strided_loader(7))
        la.fit(strided_loader(11), override=False)
        return facts(la)

    assert_as_one_process(job, 2)


def failures_of(job: Callable[..., object], n_ranks: int) -> list[str]:
    """Run a job that fails on all ranks; return what each says."""
    of_ranks = on_ranks(job, n_ranks)
    return failures(of_ranks)


def test_no_data_on_any_rank():
    def job(_):
        la = posterior()
        la.fit([])

    for said in failures_of(job, 2):
        assert said.startswith("The training loader has no data.")


def a_loader_that_breaks() -> Iterator[Batch]:
    yield from ragged_batches(lengths=(7, 4))
    raise OSError("disk is gone")


def a_batch_without_labels() -> Iterator[Batch]:
    yield from ragged_batches(lengths=(7, 4))
    tokens = torch.zeros(1, 3, dtype=torch.long)
    yield {"input_ids": tokens}


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (
            a_loader_that_breaks,
            "OSError",
            "disk is gone",
        ),
        (
            a_batch_without_labels,
            "ValueError",
            "batch 1: No labels 'labels' in the",
        ),
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
            after = facts(la)
            assert_close(after, before, rtol=0, atol=0)
            # And they can go on.
            la.fit(strided_loader())
            return failure
        return None

    first, second, third = failures_of(job, 3)
    assert second.startswith(message)
    # Whoever has not failed says who has, and why.
    assert first.startswith(f"Rank 1 failed. {error}: {message}")
    assert third == first


def test_a_rank_whose_model_has_changed_stops_all():
    def job(rank):
        la = posterior()
        la.fit(strided_loader())
        if rank == 1:
            first_block, *_ = la.blocks
            first_block.weight.data.mul_(2)
        la.fit(strided_loader(), override=False)

    first, second, third = failures_of(job, 3)
    assert "have changed since the fit" in second
    assert first.startswith(f"Rank 1 failed. RuntimeError: {second}")
    assert third == first


def test_a_rank_that_is_killed_leaves_no_other_waiting():
    def job(rank):
        la = posterior()
        if rank == 1:
            itself = os.getpid()
            os.kill(itself, signal.SIGKILL)
        la.fit(strided_loader())

    assert failures_of(job, 2)


def test_the_same_data_on_two_ranks_are_refused():
    def job(rank):
        # In other batches, which makes no difference.
        batch_size = 3 if rank else 2
        batches = ragged_batches(batch_size=batch_size)
        la = posterior()
        la.fit(batches)

    refusal = "Ranks 0 and 1 have the same 8 examples: give each rank its own shard"
    for message in failures_of(job, 2):
        assert refusal in message


def test_two_equal_texts_of_one_data_set_count_twice():
    class Twice(Texts):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return super().__getitem__(0)

    def job(_):
        texts = Twice(2)
        sampler = None
        if dist.is_initialized():
            sampler = DistributedSampler(texts, shuffle=False)
        la = posterior()
        la.fit(DataLoader(texts, batch_size=1, sampler=sampler))
        return la.n_data, la.log_marginal_likelihood().detach()

    alone = job(0)
    for n_data, evidence in on_ranks(job, 2):
        assert n_data == alone[0] == 2
        assert_close(evidence, alone[1])


@pytest.mark.parametrize(
    "differing",
    ["LoRA weights", "base or head", "settings"],
)
def test_ranks_with_other_models_are_refused(differing):
    def job(rank):
        kfac_approx = "gradient"
        if differing == "settings":
            kfac_approx = KFAC_APPROX[rank]
        la = posterior("lowrank_kron", kfac_approx)
        model = la.model.model
        if differing == "LoRA weights":
            block = la.blocks[2]
            block.weight.data += rank
        elif differing == "base or head":
            pooler = model.get_base_model().bert.pooler
            pooler.dense.bias.data += rank
        la.fit(strided_loader())

    for message in failures_of(job, 2):
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
            la = posterior()
            la.fit(strided_loader(11))
        return messages_of(caught, "data set")

    for messages in on_ranks(job, 2):
        assert messages == []


def test_a_sampler_that_leaves_examples_out_is_warned_of():
    loader = DataLoader(Texts(4), sampler=range(3))
    la = posterior()
    message = "gave 3 examples, but its data set has 4"
    with pytest.warns(UserWarning, match=message):
        la.fit(loader)


def test_progress_is_shown_by_one_rank(capfd):
    def job(_):
        la = posterior()
        la.fit(strided_loader(), progress_bar=True)

    # Whatever was written before is not of this test.
    capfd.readouterr()
    results = on_ranks(job, 2)
    assert results == [None, None]
    written = capfd.readouterr()
    assert written.err.count("| 0/6 [") == 1


# --- no better than guessing ----------------------------------------------------------


def said_by_a_fit(
    model: nn.Module,
    batches: list[Batch],
    **options,
) -> list[str]:
    """Fit a posterior; return what is said of guesses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la = make(model, **options)
        la.fit(batches)
    return messages_of(caught, "no better than guessing")


@torch.no_grad()
def logits_of(
    model: nn.Module,
    batch: Batch,
) -> Tensor:
    model.eval()
    output = model(**without_labels(batch))
    return output.logits


def with_right_labels(
    model: nn.Module,
    batches: list[Batch],
    n_right: int,
) -> list[Batch]:
    """Label the first texts as the model does, and all others wrongly."""
    relabelled = []
    n_before = 0
    for batch in batches:
        likeliest = logits_of(model, batch).argmax(-1)
        n_texts = len(likeliest)
        places = n_before + torch.arange(n_texts)
        n_before += n_texts
        wrong = (likeliest + 1) % 3
        is_right = places < n_right
        labels = torch.where(is_right, likeliest, wrong)
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


def eighteen_texts() -> list[Batch]:
    # So many that their loss is told from that of a guess.
    lengths = [2, 3, 4, 5, 6, 7] * 3
    return ragged_batches(lengths=lengths)


def test_an_adapter_without_its_head_is_warned_of_once():
    # As small as a new one's.
    model = scaled_head(1e-3)
    batches = eighteen_texts()
    (message,) = said_by_a_fit(model, batches)
    assert "its loss is 1.098" in message
    (of_diagonal,) = said_by_a_fit(model, batches, structure="diag")
    assert of_diagonal == message
    labels = labels_of(batches)
    of_all = entropy(*labels.bincount())
    of_one = of_all / len(labels)
    assert f"would be {of_one:.4f} without" in message


@pytest.mark.parametrize(
    ("n_right", "n_warnings"),
    [
        pytest.param(18, 0, id="and right"),
        pytest.param(6, 1, id="and wrong of two in three"),
    ],
)
def test_a_model_that_is_sure(n_right, n_warnings):
    # So sure that what is wrong costs far more than a guess.
    model = scaled_head(10)
    batches = with_right_labels(model, eighteen_texts(), n_right)
    said = said_by_a_fit(model, batches)
    assert len(said) == n_warnings


def test_one_class_is_no_guess():
    model = lora_model("bert")
    batches = ragged_batches()
    for batch in batches:
        # Of one class the entropy is 0, and no loss is less.
        batch["labels"].zero_()
    said = said_by_a_fit(model, batches)
    assert said == []


def test_numbers_are_no_guesses():
    model = lora_model("bert")
    batches = ragged_batches()
    for batch in batches:
        column = batch["labels"][:, None]
        # A number for each output of the model.
        batch["labels"] = column.expand(-1, 3)
    said = said_by_a_fit(model, batches, likelihood="regression")
    assert said == []


def test_rewards_are_compared_with_a_coin():
    model = lora_model("bert", n_labels=1)
    (batch,) = ragged_batches(batch_size=8)
    (rewards,) = logits_of(model, batch).T
    order = rewards.argsort()
    worse, better = order.split(4)

    def said_of(chosen, rejected):
        # As in TRL's batches.
        rows = torch.cat([chosen, rejected])
        pairs = {}
        for key, column in without_labels(batch).items():
            pairs[key] = column[rows]
        return said_by_a_fit(model, [pairs], likelihood="reward_modeling")

    assert said_of(better, worse) == []
    (message,) = said_of(worse, better)
    # The logarithm of 2.
    assert "0.6931" in message


def test_ranks_compare_the_loss_of_all_with_the_labels_of_all():
    def job(_):
        return said_by_a_fit(lora_model("bert"), strided_loader())

    expected = job(0)
    assert len(expected) == 1
    for said in on_ranks(job, 2):
        assert said == expected


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
    n_of_classes = torch.tensor(counts).double()
    n_labels = n_of_classes.sum()
    shares = n_of_classes / n_labels
    of_one = entr(shares).sum()
    return float(n_labels * of_one)


OF_THREE_LABELS = entropy(1, 3) + entropy(4, 0) + entropy(3, 1)
# Of three texts.
OF_A_COIN = 3 * entropy(1, 1) / 2


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
            OF_A_COIN,
            id="rewards",
        ),
        pytest.param(
            MULTI_LABEL,
            SEVERAL_LABELS,
            OF_THREE_LABELS,
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
    at_once = seen(likelihood, y)
    first = seen(likelihood, y[:1])
    others = seen(likelihood, y[1:])
    in_parts = first + others
    for found in (at_once, in_parts):
        loss = found.loss_of_chance()
        assert loss == pytest.approx(expected, abs=1e-12)


def seen(likelihood: str, y: Tensor) -> Seen:
    return Seen.of(TASKS[likelihood], y, [])


@dataclass(frozen=True)
class Learnt:
    """A model that is sure of the labels of its texts, and right."""

    model: nn.Module
    batches: list[Batch]


@torch.no_grad()
def of_several_labels() -> Learnt:
    """Make a model that has learnt which of three labels its texts have."""
    model = lora_model("bert")
    batches = ragged_batches()
    head = head_of(model)
    of_batches = [logits_of(model, batch) for batch in batches]
    scores = torch.cat(of_batches)
    middle = scores.median(0).values
    # Half of the texts have each label.
    head.bias.sub_(middle)
    head.weight.mul_(100)
    head.bias.mul_(100)
    for batch in batches:
        logits = logits_of(model, batch)
        has_label = logits > 0
        batch["labels"] = has_label.double()
    return Learnt(model, batches)


@torch.no_grad()
def of_tokens() -> Learnt:
    """Make a model that has learnt the labels of its texts' first two tokens."""
    model = token_classifier()
    # As sure as the other model is.
    model.get_submodule("base_model.model.classifier").weight.mul_(1e4)
    batches = ragged_batches()
    for batch in batches:
        logits = logits_of(model, batch)
        labels = logits.argmax(-1)
        labels[:, 2:] = -100
        batch["labels"] = labels
    return Learnt(model, batches)


def with_labels_of_the_next(batches: list[Batch]) -> list[Batch]:
    """Give each text the labels of the one behind it."""
    shuffled = labels_of(batches).roll(-1, 0)
    n_before = 0
    relabelled = []
    for batch in batches:
        end = n_before + len(batch["labels"])
        labels = shuffled[n_before:end]
        n_before = end
        relabelled.append(batch | {"labels": labels})
    return relabelled


LEARNT = {
    MULTI_LABEL: of_several_labels,
    TOKENS: of_tokens,
}


@pytest.mark.parametrize("likelihood", LEARNT)
def test_learnt_labels_are_not_warned_of(likelihood):
    learnt = LEARNT[likelihood]()
    said = said_by_a_fit(
        learnt.model,
        learnt.batches,
        likelihood=likelihood,
    )
    assert said == []


@pytest.mark.parametrize(
    ("likelihood", "structure"),
    [(MULTI_LABEL, "lowrank_kron"), (TOKENS, "lowrank_kron"), (TOKENS, "full")],
)
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
    of_all = seen(likelihood, labels).loss_of_chance()
    of_one = of_all / len(labels)
    assert f"would be {of_one:.4f} without" in message


@pytest.mark.parametrize("likelihood", LEARNT)
def test_ranks_count_several_labels_and_tokens_of_all(likelihood):
    def job(rank, n_ranks):
        learnt = LEARNT[likelihood]()
        shuffled = with_labels_of_the_next(learnt.batches)
        return said_by_a_fit(
            learnt.model,
            shuffled[rank::n_ranks],
            likelihood=likelihood,
        )

    expected = job(0, 1)
    assert len(expected) == 1
    for said in on_ranks(job, 2, 2):
        assert said == expected
