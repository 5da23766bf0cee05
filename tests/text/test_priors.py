"""Prior precisions that draws choose, against models with drawn weights and scores."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler

from laplace_lora_ext import TokenAgreement, TokenGridSearch
from laplace_lora_ext.training.callback import eval_figures
from laplace_lora_ext.tuning.method import draw_seed
from tests.support.models import lora_model, without_labels
from tests.support.posteriors import (
    another_training,
    count_forward_passes,
    generator,
)
from tests.support.ranks import assert_alike, on_ranks
from tests.support.texts import (
    LENGTHS,
    drawn_models,
    fitted_text,
    text_batches,
)

N_SAMPLES = 2
GRID = {
    "log_prior_prec_min": -1,
    "log_prior_prec_max": 3,
    "grid_size": 5,
}


def agreement(texts, draws, **options):
    return TokenAgreement(
        train_loader=texts,
        generator=draws,
        n_samples=N_SAMPLES,
        max_change=0.01,
        **options,
    )


def grid_search(texts, draws):
    return TokenGridSearch(
        val_loader=texts,
        generator=draws,
        n_samples=N_SAMPLES,
        **GRID,
    )


METHODS = [agreement, grid_search]


def validation(**ragged):
    return text_batches(lengths=(6, 5, 7, 4), seed=7, **ragged)


def layerwise_prior(la) -> torch.Tensor:
    return torch.linspace(0.5, 2, len(la.blocks)).double()


# --- agreement ------------------------------------------------------------------------


def rows_of(batches) -> list[dict[str, torch.Tensor]]:
    """Take the texts out of batches of one text."""
    rows = []
    for batch in batches:
        row = {key: value.squeeze(0) for key, value in batch.items()}
        rows.append(row)
    return rows


def change(la) -> float:
    """Compute draws' mean total variation distance, by drawn copies."""
    (batch,) = text_batches(batch_size=6)
    is_labelled = la.model.targets(batch) != -100
    inputs = without_labels(batch)

    def probabilities(model):
        with torch.no_grad():
            logits = model(**inputs).logits
        return logits[is_labelled].softmax(-1)

    of_map = probabilities(la.model.model)
    distances = []
    for model in drawn_models(la, 3, generator()):
        differences = probabilities(model) - of_map
        of_tokens = differences.abs().sum(-1) / 2
        distances.append(of_tokens.mean())
    return torch.stack(distances).mean().item()


@pytest.mark.parametrize("max_change", [0.005, 0.02])
@pytest.mark.parametrize("layerwise", [False, True])
def test_the_chosen_posterior_changes_tokens_as_much_as_is_allowed(
    layerwise, max_change
):
    la = fitted_text()
    base = layerwise_prior(la)
    start = {"init_prior_prec": base} if layerwise else {}
    la.optimize_prior_precision(
        method="agreement",
        train_loader=text_batches(),
        generator=generator(),
        max_change=max_change,
        n_samples=3,
        **start,
    )
    assert change(la) == pytest.approx(max_change, rel=0.02)
    if layerwise:
        factors = la.prior_precision / base
        assert_close(factors, factors.mean().expand_as(factors), rtol=1e-6, atol=0)


def test_of_many_texts_some_batches_choose():
    la = fitted_text()
    batches = text_batches(batch_size=1)
    of_some = agreement(batches, generator(), max_examples=3)
    of_some(la)
    chosen = la.prior_precision.clone()
    of_every_second = agreement(batches[::2], generator())
    of_every_second(la)
    assert torch.equal(chosen, la.prior_precision)


# --- search on a grid -----------------------------------------------------------------


def mean_loss(la, prior_precision) -> torch.Tensor:
    """Average tokens' negative log-likelihoods, by one score of each batch."""
    la.prior_precision = prior_precision
    # The search draws a seed once: all its batches and points have the same draws.
    seed = draw_seed(generator(3))
    log_probs = []
    for batch in validation():
        scores = la.score(batch, N_SAMPLES, generator(seed))
        log_probs.append(scores.tokens.log_prob[scores.labelled])
    return -torch.cat(log_probs).mean()


@pytest.mark.parametrize("layerwise", [False, True])
def test_the_losses_of_a_grid_are_those_of_scores_and_the_least_is_chosen(layerwise):
    la = fitted_text()
    base = layerwise_prior(la) if layerwise else torch.ones(1).double()
    start = {"init_prior_prec": base} if layerwise else {}
    passes = count_forward_passes(la)
    history = la.optimize_prior_precision(
        method="gridsearch",
        val_loader=validation(),
        generator=generator(3),
        n_samples=N_SAMPLES,
        **GRID,
        **start,
    )
    of_a_batch = N_SAMPLES + 1  # the draws and the model itself
    assert len(passes) == GRID["grid_size"] * of_a_batch * len(validation())
    tried = history.prior_precision
    factors = torch.logspace(-1, 3, 5, dtype=torch.float64)
    points = torch.outer(factors, base)
    assert_close(tried.double(), points, rtol=1e-6, atol=0)
    best = tried[history.objective.argmin()]
    assert_close(la.prior_precision, best.to(la.prior_precision))
    losses = torch.stack([mean_loss(la, point) for point in tried])
    assert_close(history.objective, losses, rtol=1e-10, atol=0)


def test_neither_batches_nor_the_models_mode_matter():
    model = lora_model("gpt2")
    la = fitted_text(model)

    def losses(is_training, **ragged):
        model.train(is_training)
        search = grid_search(validation(**ragged), generator(3))
        found = search(la).objective
        assert model.training == is_training
        return found

    expected = losses(is_training=False)
    of_one = losses(is_training=True, batch_size=1)
    on_the_left = losses(is_training=True, batch_size=4, padding_side="left")
    assert_close(of_one, expected, rtol=1e-9, atol=0)
    assert_close(on_the_left, expected, rtol=1e-9, atol=0)


# --- several processes ----------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_ranks_choose_by_the_texts_of_all_of_them(method):
    la = fitted_text()
    batches = text_batches(batch_size=2)

    def choose(texts, draws):
        history = method(texts, draws)(la)
        return history.objective, la.prior_precision

    def on_a_rank(rank):
        return choose(batches[rank::2], generator(rank))

    expected = choose(batches, generator(0))  # the first rank's draws
    assert_alike(on_ranks(on_a_rank, 2), expected)


def divided_texts(n=5):
    """A loader of texts, which a sampler that repeats one divides among the ranks."""
    rows = rows_of(text_batches(LENGTHS[:n], batch_size=1, padded_to=max(LENGTHS)))
    sampler = None
    if dist.is_initialized():
        sampler = DistributedSampler(rows, shuffle=False)
    return DataLoader(rows, batch_size=1, sampler=sampler)


def losses_of_agreement(la):
    choose = agreement(divided_texts(), generator())
    return choose(la).objective


def losses_of_grid(la):
    search = grid_search(divided_texts(), generator())
    return search(la).objective


def loss_of_evaluation(la):
    return eval_figures(la, divided_texts())["eval_laplace_nll"]


@pytest.mark.parametrize(
    "losses",
    [losses_of_agreement, losses_of_grid, loss_of_evaluation],
)
def test_texts_that_a_sampler_repeats_count_once(losses):
    la = fitted_text()
    la.prior_precision = 1e12  # draws of an evaluation are the model
    expected = losses(la)
    assert_alike(on_ranks(lambda _: losses(la), 2), expected)


def test_of_divided_texts_every_second_batch_is_taken():
    la = fitted_text()

    def losses(_):
        choose = agreement(divided_texts(6), generator(), max_examples=3)
        return choose(la).objective

    both = on_ranks(losses, 2)
    rows = divided_texts(6).dataset
    # Of each rank's three, the first and the last.
    taken = [rows[0], rows[1], rows[4], rows[5]]
    of_taken = agreement(DataLoader(taken), generator())
    assert_alike(both, of_taken(la).objective)


# --- data -----------------------------------------------------------------------------


class Drawn(torch.utils.data.IterableDataset):
    """Each pass gives other texts."""

    def __init__(self):
        self.n_passes = 0

    def __iter__(self):
        self.n_passes += 1
        yield from text_batches(seed=self.n_passes, batch_size=2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers", [0, 1])
def test_each_prior_precision_is_tried_on_the_same_texts(method, workers):
    la = fitted_text()
    drawn = Drawn()
    loader = DataLoader(drawn, batch_size=None, num_workers=workers)
    history = method(loader, generator())(la)
    # A worker counts the passes of a copy.
    assert drawn.n_passes == (1 if workers == 0 else 0)
    first_pass = list(Drawn())
    expected = method(first_pass, generator())(la)
    assert torch.equal(history.objective, expected.objective)
    assert len(history.objective) > 3


def test_held_out_texts_choose():
    texts = rows_of(text_batches(batch_size=1))
    learnt = []

    def train(examples):
        learnt.extend(examples.indices)
        return another_training("gpt2").eval()

    def search(**options):
        return TokenGridSearch(
            generator=generator(3),
            n_samples=N_SAMPLES,
            grid_size=9,
            **options,
        )

    la = fitted_text()
    la.optimize_prior_precision(
        method="second_training",
        train=train,
        train_loader=DataLoader(texts, batch_size=2),
        held_out=0.4,
        search=search,
    )
    assert len(learnt) == 4
    learnt_texts = [texts[place] for place in learnt]
    held_out_texts = [texts[place] for place in range(6) if place not in learnt]
    other = fitted_text(
        another_training("gpt2").eval(),
        DataLoader(learnt_texts, batch_size=2),
    )
    search_on_held_out = search(val_loader=DataLoader(held_out_texts, batch_size=2))
    other.optimize_prior_precision(method=search_on_held_out)
    assert torch.equal(la.prior_precision, other.prior_precision)
