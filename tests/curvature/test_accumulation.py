"""Structures of a curvature: their seeds, passes and settings, and the host's own."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext.curvature.accumulation import PAPER_SETTINGS, LowRankKronGGN
from laplace_lora_ext.tasks import task_of
from tests.support.cases import rows_of
from tests.support.dense import curvature_of
from tests.support.matrices import PARTS
from tests.support.models import OfBatches, lora_model, plain_model, ragged_batches
from tests.support.posteriors import fitted, make, normal, stock
from tests.support.texts import text_batches

# --- drawn labels, or signs -----------------------------------------------------------


def fisher_of(structure: str, **settings: Any) -> Tensor:
    """Fit with settings of the backend, at full rank; torch's own generator rests."""
    if structure == "lowrank_kron":
        settings["rank"] = 100
    la = make(lora_model("bert"), structure, backend_kwargs=settings)
    state = torch.get_rng_state()
    la.fit(ragged_batches())
    assert torch.equal(torch.get_rng_state(), state)
    return curvature_of(la)


@pytest.mark.parametrize(
    ("structure", "draws"),
    [("lowrank_kron", "labels"), ("lowrank_kron", "signs"), ("diag", "signs")],
)
def test_drawn_fishers_follow_their_seed_alone_and_approach_the_exact_one(
    structure, draws
):
    def drawn(num_samples: int = 1, seed: int = 0) -> Tensor:
        settings = {"draws": draws, "num_samples": num_samples, "seed": seed}
        return fisher_of(structure, stochastic=True, **settings)

    first = drawn()
    torch.manual_seed(7)
    assert torch.equal(drawn(), first)
    assert not torch.equal(drawn(seed=1), first)
    exact = fisher_of(structure, stochastic=False)
    # 1 / √64 of it in the mean.
    assert (drawn(64) - exact).norm() < (first - exact).norm() / 3


@pytest.mark.parametrize("likelihood", ["classification", "language_modeling"])
def test_draws_are_the_same_whatever_the_batch(likelihood):
    """Of many outputs, of which a fit draws by default."""
    if likelihood == "language_modeling":
        model, batches = lora_model("gpt2"), text_batches()
    else:
        model, batches = lora_model("bert", n_labels=20), ragged_batches(n_classes=20)
    # As many columns as there are: what a rank leaves out depends on the batches.
    options = {"likelihood": likelihood, "backend_kwargs": {"rank": 200}}
    of_all, of_each = (make(model, **options) for _ in range(2))
    of_all.fit(batches)
    of_each.fit([row for batch in batches for row in rows_of(batch)])
    assert_close(of_each.H.to_matrix(), of_all.H.to_matrix(), rtol=1e-8, atol=1e-10)


def test_settings_are_all_that_a_curvature_depends_on():
    settings = {"kfac_approx": "expand", "tail": False, "stochastic": True}
    draws = {"draws": "labels", "num_samples": 4, "seed": 7}
    la = make(lora_model("bert"), backend_kwargs=settings | draws)
    settings["rank"] = 10  # by default
    assert la._structure.settings == settings | draws
    # Where nothing is drawn, nothing of it decides.
    exact = settings | {"stochastic": False}
    la = make(lora_model("bert"), backend_kwargs=exact | draws)
    assert la._structure.settings == exact
    la = make(lora_model("bert"), "diag", backend_kwargs=draws)
    assert la._structure.settings == draws


LABELS = {"draws": "labels"}
DRAW = {"stochastic": True}


@pytest.mark.parametrize(
    ("n_outputs", "likelihood", "settings", "n_passes"),
    [
        # Two at most by default, and as many as are asked for.
        (20, "classification", {}, 2),
        (20, "classification", {"num_samples": 5}, 5),
        # The exact Fisher has a column a pass.
        (20, "classification", {"stochastic": False}, 19),
        # Of a text each token has its own.
        (2, "token_classification", {}, 2),
        # Numbers weigh alike.
        (19, "regression", {}, 19),
        (19, "regression", DRAW, 2),
        # Labels are drawn where that takes fewer passes.
        (8, "classification", LABELS, 7),
        (10, "classification", PAPER_SETTINGS, 8),
        (3, "classification", LABELS | DRAW, 8),
    ],
)
def test_a_batch_takes_so_many_backward_passes(
    n_outputs, likelihood, settings, n_passes
):
    backend = LowRankKronGGN(**settings)
    logits = torch.zeros(3, n_outputs)
    seeds = backend.seeds(task_of(likelihood), logits, torch.arange(3))
    assert len(seeds.vectors) == n_passes


def test_settings_that_make_no_sense_are_refused():
    for settings, message in (
        ({"kfac_approx": "kfac"}, r"'kfac'.*expand.*gradient"),
        ({"rank": -3}, "rank must be at least 0, .*-3"),
        ({"rank": 2.5}, r"rank must be .*whole, not 2\.5"),
        ({"seed": -1}, "seed must be at least 0, .*-1"),
        ({"draws": "sign"}, r"draws 'sign' is none of .*'signs', 'labels'"),
    ):
        with pytest.raises(ValueError, match=message):
            make(plain_model(), backend_kwargs=settings)


# --- the host's structures ------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_kron_is_the_stock_class_over_the_same_weights(likelihood, batch):
    batches = ragged_batches(batch_size=4)
    if likelihood == "regression":
        batches = [each | {"labels": normal(4, 3)} for each in batches]
    ours = fitted("bert", batches, "kron", likelihood=likelihood, modules_to_save=True)
    theirs = stock(lora_model("bert"), batches, PARTS, likelihood)
    found, expected = figures_of(ours, batch), figures_of(theirs, batch)
    # The host's are of other dtypes in part.
    assert_close(found, expected, rtol=1e-6, atol=1e-9, check_dtype=False)


def figures_of(la, batch) -> dict:
    """Compute what a user sees of a posterior."""
    return {
        "evidence": la.log_marginal_likelihood(),
        "prediction": la(batch),
        # Not at the mean, where it is 0.
        "square norm": la.square_norm(la.mean + 1),
    }


class Reranker(OfBatches):
    """Gives each example a logit of each of three rows, under a key of its own."""

    def forward(self, batch) -> Tensor:
        return self.model(batch["rows"]).reshape(-1, 3)


def test_kron_needs_nothing_but_labels_to_count_examples():
    batch = {"rows": normal(12, 5), "labels": torch.tensor([0, 2, 1, 1])}
    model = Reranker(plain_model(1))
    ours = make(model, "kron")
    ours.fit([batch])
    theirs = stock(model, [batch], dict_key_x="labels")
    assert_close(figures_of(ours, batch), figures_of(theirs, batch))
