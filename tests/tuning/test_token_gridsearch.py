"""Prior precisions that held-out texts choose, against scores."""

from collections.abc import Iterator, Sequence
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
from tests.support.models import lora_model
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


def layerwise_prior(la: Any) -> Tensor:
    return torch.linspace(0.5, 2, len(la.blocks)).double()


@pytest.fixture
def la():
    """A posterior of a tiny GPT-2."""
    return fitted_text()


def rows_of(batches: Sequence[Batch]) -> list[Batch]:
    """Take the texts out of batches of one text."""
    rows = []
    for batch in batches:
        row = {key: value.squeeze(0) for key, value in batch.items()}
        rows.append(row)
    return rows


# --- search on a grid -----------------------------------------------------------------


def mean_loss(la: Any, prior_precision: Tensor) -> Tensor:
    """Average tokens' negative log-likelihoods, by one score of each batch."""
    la.prior_precision = prior_precision
    # The search draws a seed once: all its batches and points have the same draws.
    seed = draw_seed(generator(3))
    log_probs = []
    for batch in validation():
        draws = generator(seed)
        scores = la.score(batch, N_SAMPLES, draws)
        log_prob = scores.tokens.log_prob
        log_probs.append(log_prob[scores.labelled])
    return -torch.cat(log_probs).mean()


def searched(la: Any, **start: Any):
    """Search a grid by its name."""
    return la.optimize_prior_precision(
        method="gridsearch",
        val_loader=validation(),
        generator=generator(3),
        n_samples=N_SAMPLES,
        **GRID,
        **start,
    )


@pytest.fixture(params=["scalar", "layerwise"])
def base(request: pytest.FixtureRequest, la: Any) -> Tensor:
    """The numbers that a grid multiplies."""
    if request.param == "scalar":
        return torch.ones(1).double()
    return layerwise_prior(la)


def test_a_grid_multiplies_the_numbers_that_it_starts_from(la, base):
    history = searched(la, init_prior_prec=base)
    factors = torch.logspace(-1, 3, 5, dtype=torch.float64)
    expected = torch.outer(factors, base)
    found = history.prior_precision.double()
    assert_close(found, expected, rtol=1e-6, atol=0)


def test_the_losses_of_a_grid_are_those_of_scores_and_the_least_is_chosen(la, base):
    history = searched(la, init_prior_prec=base)
    tried = history.prior_precision
    least = history.objective.argmin()
    best = tried[least]
    chosen = la.prior_precision
    assert_close(chosen, best.to(chosen))
    losses = [mean_loss(la, point) for point in tried]
    assert_close(history.objective, torch.stack(losses), rtol=1e-10, atol=0)


def test_a_grid_of_one_number_multiplies_1(la):
    history = searched(la)
    expected = torch.logspace(-1, 3, 5)
    assert_close(history.prior_precision.float(), expected[:, None])


def test_each_point_of_a_grid_is_a_pass_of_the_model_and_of_each_draw(la):
    passes = count_forward_passes(la)
    searched(la)
    of_a_batch = N_SAMPLES + 1
    n_batches = len(validation())
    assert len(passes) == GRID["grid_size"] * of_a_batch * n_batches


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
    batches = text_batches(batch_size=2)

    def choose(texts: Sequence[Batch], draws: torch.Generator) -> tuple[Tensor, Tensor]:
        history = grid_search(texts, draws)(la)
        return history.objective, la.prior_precision

    def on_a_rank(rank: int) -> tuple[Tensor, Tensor]:
        own = batches[rank::2]
        return choose(own, generator(rank))

    # By the first rank's draws.
    expected = choose(batches, generator(0))
    assert_alike(on_ranks(on_a_rank, 2), expected)


def divided_texts(n: int = 5) -> DataLoader:
    """Load texts, which a sampler that repeats one divides among the ranks."""
    batches = text_batches(LENGTHS[:n], batch_size=1, padded_to=max(LENGTHS))
    rows = rows_of(batches)
    sampler = None
    if dist.is_initialized():
        sampler = DistributedSampler(rows, shuffle=False)
    return DataLoader(rows, batch_size=1, sampler=sampler)


def losses_of_grid(la: Any) -> Tensor:
    search = grid_search(divided_texts(), generator())
    return search(la).objective


def loss_of_evaluation(la: Any) -> float:
    figures = eval_figures(la, divided_texts())
    return figures["eval_laplace_nll"]


@pytest.mark.parametrize("losses", [losses_of_grid, loss_of_evaluation])
def test_texts_that_a_sampler_repeats_count_once(la, losses):
    # So narrow that draws of an evaluation are the model.
    la.prior_precision = 1e12
    expected = losses(la)
    of_ranks = on_ranks(lambda _: losses(la), 2)
    assert_alike(of_ranks, expected)


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
