"""Fits by many processes are the fit by one."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.special import entr
from torch.testing import assert_close

from laplace_lora_ext.fit import Seen
from laplace_lora_ext.tasks import TASKS
from tests.support.dense import full_rank
from tests.support.models import (
    Batch,
    first_batch,
    head_of,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import KFAC_APPROX, make
from tests.support.ranks import assert_alike, failures, on_ranks, strided_loader
from tests.support.snapshots import facts_of

# Sums of the same numbers in another order, through eigendecompositions.
CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def posterior(structure: str = "lowrank_kron", kfac_approx: str = "gradient"):
    """Make a posterior whose factors lose nothing, whatever the order of the data."""
    keywords = full_rank(structure, kfac_approx=kfac_approx)
    # So broad that the curvature counts.
    return make(lora_model("bert"), structure, prior_precision=1e-3, **keywords)


Facts = dict[str, Tensor]


def facts(la) -> Facts:
    return facts_of(la, first_batch())


def assert_as_one_process(job: Callable[..., Facts], n_ranks: int) -> None:
    """Check that all ranks come to what one process comes to with all data."""
    assert_alike(on_ranks(job, n_ranks), job(), **CLOSE)


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


@pytest.mark.filterwarnings("ignore:.*no linear layer")
@pytest.mark.parametrize(("structure", "n"), [("lowrank_kron", 2), ("full", 11)])
def test_heads_and_other_matrices_are_summed_over_ranks(structure, n):
    def job(_=0):
        model = lora_model("bert", target_modules=["word_embeddings", "query"])
        la = make(model, structure, modules_to_save=True, **full_rank(structure))
        # Of two texts, one of three ranks has but a repetition.
        la.fit(strided_loader(n))
        return facts(la)

    assert_as_one_process(job, 3)


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

    assert_as_one_process(job, 2)


def broken() -> Iterator[Batch]:
    yield from ragged_batches(lengths=(7, 4))
    raise OSError("disk is gone")


def test_a_rank_that_fails_stops_all_and_nothing_is_lost():
    def job(rank):
        la = posterior()
        la.fit(strided_loader())
        before = facts(la)
        try:
            la.fit(broken() if rank == 1 else strided_loader())
        except Exception as failure:
            assert_close(facts(la), before, rtol=0, atol=0)
            # And they can go on.
            la.fit(strided_loader())
            return failure

    first, second, third = failures(on_ranks(job, 3))
    assert second == "disk is gone"
    # Whoever has not failed says who has, and why.
    assert first == third == "Rank 1 failed. OSError: disk is gone"


def test_a_rank_that_is_killed_leaves_no_other_waiting():
    def job(rank):
        la = posterior()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        la.fit(strided_loader())

    assert failures(on_ranks(job, 2))


def test_the_same_data_on_two_ranks_are_refused():
    # In other batches, which makes no difference.
    def job(rank):
        posterior().fit(ragged_batches(batch_size=3 if rank else 2))

    for message in failures(on_ranks(job, 2)):
        assert "Ranks 0 and 1 have the same 8 examples" in message


@pytest.mark.parametrize("differing", ["LoRA weights", "base or head", "settings"])
def test_ranks_with_other_models_are_refused(differing):
    def job(rank):
        is_other = bool(rank and differing == "settings")
        la = posterior("lowrank_kron", KFAC_APPROX[is_other])
        if differing == "LoRA weights":
            la.blocks[2].weight.data += rank
        elif differing == "base or head":
            la.model.model.get_base_model().bert.pooler.dense.bias.data += rank
        la.fit(strided_loader())

    for message in failures(on_ranks(job, 2)):
        assert f"Rank 1 and rank 0 differ in {differing}" in message


# --- no better than guessing ----------------------------------------------------------


def said_by_a_fit(model: nn.Module, loader: Any, **options) -> list[str]:
    """Fit a posterior; return what is said of guesses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(model, **options).fit(loader)
    messages = [str(warning.message) for warning in caught]
    # Each rank has a part of the data set, which is nothing to be told.
    assert not [each for each in messages if "its data set has" in each]
    return [each for each in messages if "no better than guessing" in each]


# A model's logits times a factor, how many of 18 labels are its own, and what is said.
@pytest.mark.parametrize(
    ("factor", "n_right", "n_warnings"),
    # As small as a new head's, right, and so sure that a wrong one costs far more.
    [(1e-3, 6, 1), (10, 18, 0), (10, 6, 1)],
)
def test_a_model_that_is_no_better_than_guessing_is_warned_of(
    factor, n_right, n_warnings
):
    model = lora_model("bert").eval()
    head = head_of(model)
    head.weight.data.mul_(factor)
    head.bias.data.zero_()
    (batch,) = ragged_batches(lengths=[2, 3, 4, 5, 6, 7] * 3, batch_size=18)
    likeliest = model(**without_labels(batch)).logits.argmax(-1)
    labels = torch.where(torch.arange(18) < n_right, likeliest, (likeliest + 1) % 3)
    if factor < 1:  # as a new head's: its loss is that of a guess, of labels alike
        labels = torch.arange(18) % 3
    said = said_by_a_fit(model, [batch | {"labels": labels}])
    assert len(said) == n_warnings
    if n_warnings:
        of_one = entropy(*labels.bincount()) / 18
        assert f"would be {of_one:.4f} without" in said[0]
    # Of one class the entropy is 0, and no loss is less; and numbers are no guesses.
    assert said_by_a_fit(model, [batch | {"labels": 0 * labels}]) == []
    numbers = labels[:, None].expand(-1, 3)
    options = {"likelihood": "regression"}
    assert said_by_a_fit(model, [batch | {"labels": numbers}], **options) == []


def test_ranks_compare_the_loss_of_all_with_the_labels_of_all():
    def job(_=0):
        return said_by_a_fit(lora_model("bert"), strided_loader())

    expected = job()
    assert len(expected) == 1
    assert on_ranks(job, 2) == [expected] * 2


# --- chance, of several labels and of labels of tokens --------------------------------


SEVERAL_LABELS = torch.tensor([[1.0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 0]])
LABELS_OF_TOKENS = torch.tensor([[0, 1, -100, 1], [2, -100, -100, 1]])


def entropy(*counts: int) -> float:
    """Sum the entropy of so many labels of each class over all labels, in nats."""
    n_of_classes = torch.tensor(counts).double()
    n_labels = n_of_classes.sum()
    return float(n_labels * entr(n_of_classes / n_labels).sum())


OF_THREE_LABELS = entropy(1, 3) + entropy(4, 0) + entropy(3, 1)


@pytest.mark.parametrize(
    ("likelihood", "y", "expected"),
    [
        ("classification", torch.tensor([0, 2, 2, 2]), entropy(1, 3)),
        ("classification", torch.tensor([2, 2]), 0),
        # A coin, whichever of two texts is said to be preferred.
        ("reward_modeling", torch.tensor([0, 0, 0]), 3 * entropy(1, 1) / 2),
        ("multi_label_classification", SEVERAL_LABELS, OF_THREE_LABELS),
        ("multi_label_classification", SEVERAL_LABELS[:, 0], entropy(1, 3)),
        # A negative label counts for nothing.
        ("token_classification", LABELS_OF_TOKENS, entropy(1, 3, 1)),
        ("language_modeling", LABELS_OF_TOKENS, 0),
        ("regression", SEVERAL_LABELS, 0),
    ],
)
def test_the_loss_of_chance_is_the_entropy_of_each_kind_of_labels(
    likelihood, y, expected
):
    in_parts = seen(likelihood, y[:1]) + seen(likelihood, y[1:])
    for found in (seen(likelihood, y), in_parts):
        assert found.loss_of_chance() == pytest.approx(expected, abs=1e-12)


def seen(likelihood: str, y: Tensor) -> Seen:
    return Seen.of(TASKS[likelihood], y, [])
