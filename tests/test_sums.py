"""Fits by many processes are the fit by one."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.special import entr
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler

from laplace_lora_ext.fit import Seen
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
from tests.support.posteriors import KFAC_APPROX, make
from tests.support.ranks import Texts, assert_alike, failures, on_ranks, strided_loader
from tests.support.snapshots import facts_of
from tests.support.tokens import token_classifier

MULTI_LABEL = "multi_label_classification"
TOKENS = "token_classification"

# Sums of the same numbers in another order, through eigendecompositions.
CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def posterior(structure: str = "lowrank_kron", kfac_approx: str = "gradient"):
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
    return facts_of(la, first_batch())


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
    keywords = full_rank(structure)
    return make(lora_model("bert"), structure, modules_to_save=True, **keywords)


def with_embedding(structure: str):
    model = lora_model("bert", target_modules=["word_embeddings", "query"])
    return make(model, structure, **full_rank(structure))


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


def failures_of(job: Callable[..., object], n_ranks: int) -> list[str]:
    """Run a job that fails on all ranks; return what each says."""
    return failures(on_ranks(job, n_ranks))


def test_no_data_on_any_rank():
    for said in failures_of(lambda _: posterior().fit([]), 2):
        assert "no data" in said


def a_loader_that_breaks() -> Iterator[Batch]:
    yield from ragged_batches(lengths=(7, 4))
    raise OSError("disk is gone")


def a_batch_without_labels() -> Iterator[Batch]:
    yield from ragged_batches(lengths=(7, 4))
    tokens = torch.zeros(1, 3, dtype=torch.long)
    yield {"input_ids": tokens}


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (a_loader_that_breaks, "OSError: disk is gone"),
        (a_batch_without_labels, "ValueError: batch 1: No labels"),
    ],
)
def test_a_rank_that_fails_stops_all_and_nothing_is_lost(broken, error):
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
        return None

    first, second, third = failures_of(job, 3)
    assert second.startswith(error.partition(": ")[2])
    # Whoever has not failed says who has, and why.
    assert first.startswith(f"Rank 1 failed. {error}")
    assert third == first


def test_a_rank_whose_model_has_changed_stops_all():
    def job(rank):
        la = posterior()
        la.fit(strided_loader())
        if rank == 1:
            la.blocks[0].weight.data.mul_(2)
        la.fit(strided_loader(), override=False)

    first, second = failures_of(job, 2)
    assert "have changed since the fit" in second
    assert first.startswith(f"Rank 1 failed. RuntimeError: {second}")


def test_a_rank_that_is_killed_leaves_no_other_waiting():
    def job(rank):
        la = posterior()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        la.fit(strided_loader())

    assert failures_of(job, 2)


def test_the_same_data_on_two_ranks_are_refused():
    # In other batches, which makes no difference.
    def job(rank):
        posterior().fit(ragged_batches(batch_size=3 if rank else 2))

    for message in failures_of(job, 2):
        assert "Ranks 0 and 1 have the same 8 examples" in message


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


@pytest.mark.parametrize("differing", ["LoRA weights", "base or head", "settings"])
def test_ranks_with_other_models_are_refused(differing):
    def job(rank):
        is_other = rank and differing == "settings"
        la = posterior("lowrank_kron", KFAC_APPROX[bool(is_other)])
        if differing == "LoRA weights":
            la.blocks[2].weight.data += rank
        elif differing == "base or head":
            la.model.model.get_base_model().bert.pooler.dense.bias.data += rank
        la.fit(strided_loader())

    for message in failures_of(job, 2):
        assert f"Rank 1 and rank 0 differ in {differing}" in message


def messages_of(caught: list[warnings.WarningMessage], about: str) -> list[str]:
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
    with pytest.warns(UserWarning, match="3 examples, but its data set has 4"):
        posterior().fit(loader)


def test_progress_is_shown_by_one_rank(capfd):
    # Whatever was written before is not of this test.
    capfd.readouterr()
    job = lambda _: posterior().fit(strided_loader(), progress_bar=True)  # noqa: E731
    assert on_ranks(job, 2) == [None, None]
    assert capfd.readouterr().err.count("| 0/6 [") == 1


# --- no better than guessing ----------------------------------------------------------


def said_by_a_fit(model: nn.Module, batches: list[Batch], **options) -> list[str]:
    """Fit a posterior; return what is said of guesses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la = make(model, **options)
        la.fit(batches)
    return messages_of(caught, "no better than guessing")


@torch.no_grad()
def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    return model.eval()(**without_labels(batch)).logits


def with_right_labels(
    model: nn.Module, batches: list[Batch], n_right: int
) -> list[Batch]:
    """Label the first texts as the model does, and all others wrongly."""
    relabelled = []
    n_before = 0
    for batch in batches:
        likeliest = logits_of(model, batch).argmax(-1)
        is_right = n_before + torch.arange(len(likeliest)) < n_right
        n_before += len(likeliest)
        labels = torch.where(is_right, likeliest, (likeliest + 1) % 3)
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
    return ragged_batches(lengths=[2, 3, 4, 5, 6, 7] * 3)


def test_an_adapter_without_its_head_is_warned_of_once():
    # As small as a new one's.
    model = scaled_head(1e-3)
    batches = eighteen_texts()
    (message,) = said_by_a_fit(model, batches)
    assert "its loss is 1.098" in message
    assert said_by_a_fit(model, batches, structure="diag") == [message]
    labels = labels_of(batches)
    of_one = entropy(*labels.bincount()) / len(labels)
    assert f"would be {of_one:.4f} without" in message


@pytest.mark.parametrize(("n_right", "n_warnings"), [(18, 0), (6, 1)])
def test_a_model_that_is_sure_and_right_or_wrong_of_two_in_three(n_right, n_warnings):
    # So sure that what is wrong costs far more than a guess.
    model = scaled_head(10)
    batches = with_right_labels(model, eighteen_texts(), n_right)
    assert len(said_by_a_fit(model, batches)) == n_warnings


def test_one_class_and_numbers_are_no_guesses():
    model = lora_model("bert")
    batches = ragged_batches()
    for batch in batches:
        # Of one class the entropy is 0, and no loss is less.
        batch["labels"].zero_()
    assert said_by_a_fit(model, batches) == []
    for batch in batches:
        # A number for each output of the model.
        batch["labels"] = batch["labels"][:, None].expand(-1, 3)
    assert said_by_a_fit(model, batches, likelihood="regression") == []


def test_rewards_are_compared_with_a_coin():
    model = lora_model("bert", n_labels=1)
    (batch,) = ragged_batches(batch_size=8)
    (rewards,) = logits_of(model, batch).T
    worse, better = rewards.argsort().split(4)

    def said_of(chosen, rejected):
        # As in TRL's batches.
        rows = torch.cat([chosen, rejected])
        pairs = {key: column[rows] for key, column in without_labels(batch).items()}
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
        (MULTI_LABEL, SEVERAL_LABELS, OF_THREE_LABELS),
        (MULTI_LABEL, SEVERAL_LABELS[:, 0], entropy(1, 3)),
        # A negative label counts for nothing.
        (TOKENS, LABELS_OF_TOKENS, entropy(1, 3, 1)),
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


Learnt = tuple[nn.Module, list[Batch]]
"""A model that is sure of the labels of its texts, and right."""


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
        batch["labels"] = (logits_of(model, batch) > 0).double()
    return model, batches


@torch.no_grad()
def of_tokens() -> Learnt:
    """Make a model that has learnt the labels of its texts' first two tokens."""
    model = token_classifier()
    # As sure as the other model is.
    model.get_submodule("base_model.model.classifier").weight.mul_(1e4)
    batches = ragged_batches()
    for batch in batches:
        batch["labels"] = logits_of(model, batch).argmax(-1)
        batch["labels"][:, 2:] = -100
    return model, batches


def with_labels_of_the_next(batches: list[Batch]) -> list[Batch]:
    """Give each text the labels of the one behind it."""
    shuffled = labels_of(batches).roll(-1, 0)
    parts = shuffled.split([len(batch["labels"]) for batch in batches])
    return [
        batch | {"labels": part} for batch, part in zip(batches, parts, strict=True)
    ]


LEARNT = {MULTI_LABEL: of_several_labels, TOKENS: of_tokens}


def said_of(likelihood: str, batches: slice = slice(None), **options) -> list[str]:
    """Tell what is said of learnt labels that are another text's."""
    model, learnt = LEARNT[likelihood]()
    shuffled = with_labels_of_the_next(learnt)[batches]
    return said_by_a_fit(model, shuffled, likelihood=likelihood, **options)


@pytest.mark.parametrize(
    ("likelihood", "structure"),
    [(MULTI_LABEL, "lowrank_kron"), (TOKENS, "lowrank_kron"), (TOKENS, "full")],
)
def test_shuffled_labels_are_warned_of_and_learnt_ones_are_not(likelihood, structure):
    options = {"likelihood": likelihood, "structure": structure}
    model, batches = LEARNT[likelihood]()
    assert said_by_a_fit(model, batches, **options) == []
    (message,) = said_of(**options)
    labels = labels_of(batches)
    of_one = seen(likelihood, labels).loss_of_chance() / len(labels)
    assert f"would be {of_one:.4f} without" in message


@pytest.mark.parametrize("likelihood", LEARNT)
def test_ranks_count_several_labels_and_tokens_of_all(likelihood):
    def job(rank, n_ranks):
        return said_of(likelihood, slice(rank, None, n_ranks))

    expected = job(0, 1)
    assert len(expected) == 1
    assert on_ranks(job, 2, 2) == [expected] * 2
