"""A fit is taken over whole or not at all; one by many processes is that by one."""

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.special import entr
from torch.testing import assert_close

from laplace_lora_ext import GridSearch, from_pretrained
from laplace_lora_ext.fit import loss_of_chance
from laplace_lora_ext.tasks import TASKS
from tests.support.dense import full_rank
from tests.support.models import (
    Batch,
    TwoLinear,
    first_batch,
    head_of,
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
    with_lora,
    without_labels,
)
from tests.support.posteriors import OURS_AND_A_HOSTS, STRUCTURES, fitted, make
from tests.support.ranks import assert_alike, failures, on_ranks, strided_loader
from tests.support.snapshots import Snapshot, facts_of, half_trained


def broken_off() -> Iterator[Any]:
    """Fail after two good batches."""
    yield from pairs(2)
    raise KeyboardInterrupt


# --- what they leave ------------------------------------------------------------------


# To the last digit.
SAME = {"rtol": 0, "atol": 0}
((X, _),) = pairs()


def test_a_fit_shows_a_bar_where_one_is_asked_for(la, capsys):
    la.fit(ragged_batches())
    assert not capsys.readouterr().err
    la.fit(ragged_batches(), progress_bar=True)
    assert "[Computing Hessian]: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("structure", OURS_AND_A_HOSTS)
def test_a_failing_fit_leaves_what_was_before_it(structure):
    # Of which every pass in training mode is another one.
    model = half_trained(plain_model(lora_dropout=0.5))
    la = make(model, structure)
    *first, last = pairs(3)
    la.fit(first)
    la.prior_precision = 3.0
    expected = facts_of(la, X)
    before = dict(vars(la))
    snapshot = Snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        la.fit(broken_off(), override=False)
    snapshot.assert_equal(model)
    assert vars(la).keys() == before.keys()
    for name, value in before.items():
        assert vars(la)[name] is value, name
    assert_close(facts_of(la, X), expected, **SAME)
    # It can still be fitted, as if nothing had been tried.
    la.fit([last], override=False)
    fresh = make(plain_model(), structure, prior_precision=3.0)
    fresh.fit(pairs(3))
    assert_close(facts_of(la, X), facts_of(fresh, X), **SAME)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_fit_in_parts_is_one_fit(structure, tmp_path):
    """To the last digit, though one column of a large factor is far fewer than all."""
    options = {}
    # The others have no rank.
    if structure == "lowrank_kron":
        # By draws, which depend on how many examples came before.
        options["backend_kwargs"] = {"rank": 1, "draws": "labels", "num_samples": 1}
    model = lora_model("bert")
    texts = ragged_batches(batch_size=1)
    at_once = make(model, structure, **options)
    at_once.fit(texts)
    in_parts = make(model, structure, **options)
    for place, text in enumerate(texts):
        in_parts.fit([text], override=False)
        if place % 2:
            in_parts.save_pretrained(tmp_path)
            in_parts = from_pretrained(model, tmp_path)
    assert at_once.n_data == 8
    assert_close(facts_of(in_parts, texts[0]), facts_of(at_once, texts[0]), **SAME)


class Skipping(TwoLinear):
    """Leaves its second layer out for a single example."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden) if len(x) > 1 else hidden[:, :3]


def test_more_data_may_leave_a_layer_out():
    la = make(with_lora(Skipping(), "first", "second"))
    (whole,) = pairs(1)
    first_alone = tuple(part[:1] for part in whole)
    la.fit([whole])
    la.fit([first_alone], override=False)
    assert la.n_data == len(whole[0]) + 1
    # A new fit knows nothing of it.
    with pytest.raises(RuntimeError, match="No batch used 2 of 4 weights"):
        la.fit([first_alone])
    # One rank may have what another lacks, or nothing.
    shards = [first_alone], [whole], []
    assert on_ranks(lambda rank: la.fit(shards[rank]), 3) == [None] * 3


def test_a_posterior_that_is_not_fitted_says_so(unfitted):
    for use in (
        lambda: unfitted(X),
        lambda: unfitted(X, pred_type="nn", link_approx="mc"),
        lambda: unfitted.predictive_moments(X),
        lambda: unfitted.functional_samples(X),
        unfitted.log_marginal_likelihood,
        lambda: unfitted.sample(2),
        unfitted.state_dict,
        unfitted.optimize_prior_precision,
    ):
        with pytest.raises(AttributeError, match=r"fit\(\)"):
            use()
    # A search that is refused has chosen nothing.
    assert unfitted.prior_precision.tolist() == [1.0]


# --- many processes -----------------------------------------------------------------

# Sums of the same numbers in another order, through eigendecompositions.
CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def posterior(**settings: Any):
    """Make a posterior whose factors lose nothing, whatever the order of the data."""
    # So broad that the curvature counts.
    return make(lora_model("bert"), prior_precision=1e-3, **full_rank(**settings))


@pytest.mark.filterwarnings("ignore:.*no linear layer")
def test_draws_other_matrices_and_more_data_are_summed_over_ranks():
    def job(_=0):
        model = lora_model("bert", target_modules=["word_embeddings", "query"])
        # What is drawn is the same, too: of three classes one sum of two columns.
        settings = full_rank(stochastic=True, num_samples=1)
        la = make(model, modules_to_save=True, **settings)
        # Of two texts, one of three ranks has but a repetition.
        for n_texts in (2, 7):
            la.fit(strided_loader(n_texts), override=False)
        return facts_of(la, first_batch())

    assert_alike(on_ranks(job, 3), job(), **CLOSE)


def broken() -> Iterator[Batch]:
    yield from ragged_batches(lengths=(7, 4))
    raise OSError("disk is gone")


def test_a_rank_that_fails_stops_all_and_nothing_is_lost():
    def job(rank):
        la = posterior()
        la.fit(strided_loader())
        before = facts_of(la, first_batch())
        try:
            la.fit(broken() if rank == 1 else strided_loader())
        except Exception as failure:
            assert_close(facts_of(la, first_batch()), before, **SAME)
            # And they can go on.
            la.fit(strided_loader())
            return failure

    first, second, third = failures(on_ranks(job, 3))
    assert second == "disk is gone"
    # Whoever has not failed says who has, and why.
    assert first == third == "Rank 1 failed. OSError: disk is gone"


@pytest.mark.parametrize("is_search", [False, True])
def test_the_same_data_on_two_ranks_are_refused(is_search):
    la = fitted()

    # In other batches, which makes no difference.
    def job(rank):
        data = ragged_batches(batch_size=3 if rank else 2)
        if is_search:
            GridSearch(val_loader=data)(la)
        else:
            la.fit(data)

    for message in failures(on_ranks(job, 2)):
        assert "Ranks 0 and 1 have the same 8 examples" in message


@pytest.mark.parametrize("differing", ["LoRA weights", "base or head", "settings"])
def test_ranks_with_other_models_are_refused(differing):
    def job(rank):
        is_other = bool(rank and differing == "settings")
        la = posterior(kfac_approx="expand" if is_other else "gradient")
        if differing == "LoRA weights":
            la.blocks[2].weight.data += rank
        elif differing == "base or head":
            la.model.model.get_base_model().bert.pooler.dense.bias.data += rank
        la.fit(strided_loader())

    for message in failures(on_ranks(job, 2)):
        assert "Rank 1 and rank 0 differ in weights or settings" in message


# --- no better than guessing ----------------------------------------------------------


def said_by_a_fit(model: nn.Module, loader: Any) -> list[str]:
    """Fit a posterior; return what is said of guesses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(model).fit(loader)
    messages = [str(warning.message) for warning in caught]
    return [each for each in messages if "no better than guessing" in each]


# A model's logits times a factor: as small as a new head's, or sure and right.
@pytest.mark.parametrize(("factor", "n_warnings"), [(1e-3, 1), (10, 0)])
def test_a_model_that_is_no_better_than_guessing_is_warned_of(factor, n_warnings):
    model = lora_model("bert").eval()
    head = head_of(model)
    head.weight.data.mul_(factor)
    head.bias.data.zero_()
    (batch,) = ragged_batches(lengths=[2, 3, 4, 5, 6, 7] * 3, batch_size=18)
    labels = torch.arange(18) % 3
    if not n_warnings:
        labels = model(**without_labels(batch)).logits.argmax(-1)
    said = said_by_a_fit(model, [batch | {"labels": labels}])
    assert len(said) == n_warnings
    if n_warnings:
        assert re.search(r"loss is 1\.\d+, and would be 1\.0986 without", said[0])
    # Of one class the entropy is 0, and no loss is less.
    assert said_by_a_fit(model, [batch | {"labels": 0 * labels}]) == []


def entropy(*counts: int) -> float:
    """Sum the entropy of so many labels of each class over all labels, in nats."""
    n_of_classes = torch.tensor(counts).double()
    n_labels = n_of_classes.sum()
    return float(n_labels * entr(n_of_classes / n_labels).sum())


def test_ranks_compare_the_loss_of_all_with_the_labels_of_all():
    def job(_=0):
        return said_by_a_fit(lora_model("bert"), strided_loader())

    expected = job()
    assert len(expected) == 1
    assert on_ranks(job, 2) == [expected] * 2


@pytest.mark.parametrize(
    ("likelihood", "y", "expected"),
    [
        ("classification", [0, 2, 2, 2], [(1, 3)]),
        # A coin, whichever of two texts is said to be preferred.
        ("reward_modeling", [0, 0, 0, 0], [(2, 2)]),
        (
            "multi_label_classification",
            [[1.0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 0]],
            [(1, 3), (3, 1)],
        ),
        ("multi_label_classification", [1.0, 0, 0, 0], [(1, 3)]),
        # A negative label counts for nothing.
        ("token_classification", [[0, 1, -100, 1], [2, -100, -100, 1]], [(1, 3, 1)]),
        ("language_modeling", [[0, 1, -100, 1]], []),
        ("regression", [[1.0, 0.0]], []),
    ],
)
def test_the_loss_of_chance_is_the_entropy_of_each_kind_of_labels(
    likelihood, y, expected
):
    class_counts = TASKS[likelihood].class_counts
    of_all = class_counts(torch.tensor(y))
    of_parts = class_counts(torch.tensor(y[:1])) + class_counts(torch.tensor(y[1:]))
    for found in (of_all, of_parts):
        entropies = sum(entropy(*counts) for counts in expected)
        assert loss_of_chance(found) == pytest.approx(entropies, abs=1e-12)
