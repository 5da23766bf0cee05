"""Prior precisions that held-out texts choose, against scores."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler

from laplace_lora_ext import TokenGridSearch
from laplace_lora_ext.training.stages import eval_figures
from laplace_lora_ext.tuning.method import draw_seed
from tests.support.models import lora_model, one_by_one
from tests.support.posteriors import count_forward_passes, generator
from tests.support.ranks import assert_alike, on_ranks
from tests.support.texts import LENGTHS, fitted_text, text_batches

# Few, for each of them costs a pass at each point.
N_SAMPLES = 2
GRID = {"log_prior_prec_min": -1, "log_prior_prec_max": 3, "grid_size": 5}


Batch = dict[str, Tensor]


def grid_search(texts: Any, draws: torch.Generator) -> TokenGridSearch:
    return TokenGridSearch(
        val_loader=texts, generator=draws, n_samples=N_SAMPLES, **GRID
    )


def validation(**ragged: Any) -> list[Batch]:
    return text_batches(lengths=(6, 5, 7, 4), seed=7, **ragged)


@pytest.fixture
def la():
    """A posterior of a tiny GPT-2."""
    return fitted_text()


# --- search on a grid -----------------------------------------------------------------


def mean_loss(la: Any, prior_precision: Tensor) -> Tensor:
    """Average tokens' negative log-likelihoods, by one score of each batch."""
    la.prior_precision = prior_precision
    # The search draws a seed once: all its batches and points have the same draws.
    seed = draw_seed(generator(3))
    log_probs = []
    for batch in validation():
        scores = la.score(batch, N_SAMPLES, generator(seed))
        log_probs.append(scores.tokens.log_prob[scores.labelled])
    return -torch.cat(log_probs).mean()


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
def test_the_losses_of_a_grid_are_those_of_scores_and_the_least_is_chosen(la, prior):
    base = (
        torch.ones(1) if prior == "scalar" else torch.linspace(0.5, 2, len(la.blocks))
    )
    options = {} if prior == "scalar" else {"init_prior_prec": base}
    passes = count_forward_passes(la)
    history = la.optimize_prior_precision(
        method="gridsearch",
        val_loader=validation(),
        generator=generator(3),
        n_samples=N_SAMPLES,
        **options,
        **GRID,
    )
    # Each point is a pass of the model and of each draw.
    assert len(passes) == GRID["grid_size"] * (N_SAMPLES + 1) * len(validation())
    tried = history.prior_precision
    expected = torch.outer(torch.logspace(-1, 3, 5), base)
    assert_close(tried.float(), expected, rtol=1e-6, atol=0)
    best = tried[history.objective.argmin()]
    assert_close(la.prior_precision, best.to(la.prior_precision))
    losses = [mean_loss(la, point) for point in tried]
    assert_close(history.objective, torch.stack(losses), rtol=1e-10, atol=0)


def test_neither_batches_nor_the_models_mode_matter():
    model = lora_model("gpt2")
    la = fitted_text(model)

    def losses(is_training: bool, **ragged: Any) -> Tensor:
        model.train(is_training)
        search = grid_search(validation(**ragged), generator(3))
        found = search(la).objective
        assert model.training == is_training
        return found

    expected = losses(is_training=False)
    of_one = losses(is_training=True, batch_size=1)
    on_the_left = losses(is_training=True, batch_size=4, padding_side="left")
    # Sums of float64 in another order.
    assert_close(of_one, expected, rtol=1e-9, atol=0)
    assert_close(on_the_left, expected, rtol=1e-9, atol=0)


# --- several processes ----------------------------------------------------------------


def test_ranks_choose_by_the_texts_of_all_of_them(la):
    rows = one_by_one(text_batches(LENGTHS[:5], padded_to=max(LENGTHS)))
    # So narrow that draws of an evaluation are the model.
    la.prior_precision = 1e12

    def choose(rank: int = 0) -> tuple[Tensor, float]:
        # A sampler that repeats a text divides them among the ranks.
        is_divided = dist.is_initialized()
        sampler = DistributedSampler(rows, shuffle=False) if is_divided else None
        loader = DataLoader(rows, batch_size=1, sampler=sampler)
        figures = eval_figures(la, loader)
        # By the first rank's draws.
        objective = grid_search(loader, generator(rank))(la).objective
        return objective, figures["eval_laplace_nll"]

    assert_alike(on_ranks(choose, 2), choose())


# --- data -----------------------------------------------------------------------------


class Drawn(torch.utils.data.IterableDataset):
    """Each pass gives other texts."""

    def __init__(self) -> None:
        self.n_passes = 0

    def __iter__(self) -> Iterator[Batch]:
        self.n_passes += 1
        yield from text_batches(seed=self.n_passes, batch_size=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_each_prior_precision_is_tried_on_the_same_texts(la, workers):
    drawn = Drawn()
    loader = DataLoader(drawn, batch_size=None, num_workers=workers)
    choose = grid_search(loader, generator())
    objective = choose(la).objective
    # A worker counts the passes of a copy.
    expected_passes = 1 if workers == 0 else 0
    assert drawn.n_passes == expected_passes
    first_pass = list(Drawn())
    choose_again = grid_search(first_pass, generator())
    expected = choose_again(la).objective
    assert torch.equal(objective, expected)
    assert len(objective) > 3
