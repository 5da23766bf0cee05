"""Prior precisions that draws choose, against models with drawn weights and scores."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from laplace_lora_ext import TokenAgreement, TokenGridSearch
from laplace_lora_ext.training.callback import eval_figures
from laplace_lora_ext.tuning.method import draw_seed
from tests.support.models import lora_model
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

FEW = {"n_samples": 2, "max_change": 0.01}
GRID = {
    "log_prior_prec_min": -1,
    "log_prior_prec_max": 3,
    "grid_size": 5,
    "n_samples": 2,
}


def change(la):
    """Mean total variation distance of the draws from the model, by copies with drawn weights."""
    (batch,) = text_batches(batch_size=6)
    places = la.model.targets(batch) != -100
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        own, *drawn = (
            model(**inputs).logits[places].softmax(-1)
            for model in (
                la.model.model,
                *drawn_models(la, 3, generator()),
            )
        )
    return (sum((p - own).abs().sum(-1).mean() / 2 for p in drawn) / 3).item()


@pytest.mark.parametrize("max_change", [0.005, 0.02])
@pytest.mark.parametrize("layerwise", [False, True])
def test_the_chosen_posterior_changes_tokens_as_much_as_is_allowed(layerwise, max_change):
    la = fitted_text()
    base = torch.linspace(0.5, 2, len(la.blocks)).double()
    start = {"init_prior_prec": base} if layerwise else {}
    start |= {"max_change": max_change, "n_samples": 3}
    data = {
        "train_loader": text_batches(),
        "generator": generator(),
    }
    la.optimize_prior_precision(method="agreement", **data, **start)
    assert change(la) == pytest.approx(max_change, rel=0.02)
    if layerwise:
        ratios = la.prior_precision / base
        torch.testing.assert_close(
            ratios,
            ratios[:1].expand_as(ratios),
            rtol=1e-6,
            atol=0,
        )


def test_of_many_texts_some_batches_choose():
    la = fitted_text()
    batches = text_batches(batch_size=1)
    TokenAgreement(
        train_loader=batches,
        max_examples=3,
        generator=generator(),
        **FEW,
    )(la)
    chosen = la.prior_precision.clone()
    TokenAgreement(train_loader=batches[::2], generator=generator(), **FEW)(la)
    assert torch.equal(chosen, la.prior_precision)


def validation(**ragged):
    return text_batches(lengths=(6, 5, 7, 4), seed=7, **ragged)


def direct(la, prior_precision):
    """Mean negative log-likelihood of a token, by one score of each batch."""
    la.prior_precision = prior_precision
    seed = draw_seed(generator(3))
    scores = [la.score(batch, 2, generator(seed)) for batch in validation()]
    total = sum(of_batch.sums.log_prob.sum() for of_batch in scores)
    return -total / sum(of_batch.labelled.sum() for of_batch in scores)


@pytest.mark.parametrize("layerwise", [False, True])
def test_the_losses_of_a_grid_are_those_of_scores_and_the_least_is_chosen(
    layerwise,
):
    la = fitted_text()
    base = torch.linspace(0.5, 2, len(la.blocks)).double() if layerwise else torch.ones(1).double()
    start = {"init_prior_prec": base} if layerwise else {}
    passes = count_forward_passes(la)
    history = la.optimize_prior_precision(
        method="gridsearch",
        val_loader=validation(),
        generator=generator(3),
        **GRID,
        **start,
    )
    assert len(passes) == 5 * (2 + 1) * len(validation())
    grid = torch.logspace(-1, 3, 5, dtype=torch.float64)
    points = history.prior_precision.double()
    torch.testing.assert_close(points, grid[:, None] * base, rtol=1e-6, atol=0)
    best = history.prior_precision[history.objective.argmin()]
    torch.testing.assert_close(la.prior_precision, best.to(la.prior_precision))
    expected = torch.stack([direct(la, point) for point in history.prior_precision])
    torch.testing.assert_close(history.objective, expected, rtol=1e-10, atol=0)


def test_neither_batches_nor_the_models_mode_matter():
    model = lora_model("gpt2")
    la, losses = fitted_text(model), []
    for ragged in (
        {},
        {"batch_size": 1},
        {"batch_size": 4, "padding_side": "left"},
    ):
        model.train(bool(ragged))
        method = TokenGridSearch(
            val_loader=validation(**ragged),
            generator=generator(3),
            **GRID,
        )
        losses.append(method(la).objective)
        assert model.training == bool(ragged)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=0)
    torch.testing.assert_close(losses[0], losses[2], rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("method", "data"),
    [
        (TokenAgreement, "train_loader"),
        (TokenGridSearch, "val_loader"),
    ],
)
def test_ranks_choose_by_the_texts_of_all_of_them(method, data):
    la, batches = fitted_text(), text_batches(batch_size=2)

    def choose(texts, draws):
        options = FEW if data == "train_loader" else GRID
        history = method(generator=draws, **{data: texts}, **options)(la)
        return history.objective, la.prior_precision

    expected = choose(batches, generator(0))  # the first rank's draws
    assert_alike(
        on_ranks(
            lambda rank: choose(batches[rank::2], generator(rank)),
            2,
        ),
        expected,
    )


def divided_texts(n=5):
    """A loader of texts, which a sampler that repeats one divides among the ranks."""
    texts = text_batches(LENGTHS[:n], batch_size=1, padded_to=max(LENGTHS))
    rows = [{key: value[0] for key, value in text.items()} for text in texts]
    sampler = DistributedSampler(rows, shuffle=False) if dist.is_initialized() else None
    return DataLoader(rows, batch_size=1, sampler=sampler)


LOSSES = {
    "agreement": lambda la: (
        TokenAgreement(
            train_loader=divided_texts(),
            generator=generator(),
            **FEW,
        )(la).objective
    ),
    "gridsearch": lambda la: (
        TokenGridSearch(
            val_loader=divided_texts(),
            generator=generator(),
            **GRID,
        )(la).objective
    ),
    "evaluation": lambda la: eval_figures(la, divided_texts())["eval_laplace_nll"],
}


@pytest.mark.parametrize("kind", LOSSES)
def test_texts_that_a_sampler_repeats_count_once(kind):
    la = fitted_text()
    la.prior_precision = 1e12  # draws of an evaluation are the model
    expected = LOSSES[kind](la)
    assert_alike(on_ranks(lambda _: LOSSES[kind](la), 2), expected)


def test_of_divided_texts_every_second_batch_is_taken():
    la = fitted_text()

    def losses(_):
        method = TokenAgreement(
            train_loader=divided_texts(6),
            max_examples=3,
            generator=generator(),
            **FEW,
        )
        return method(la).objective

    both = on_ranks(losses, 2)  # the first of three on each rank, and the last
    some = [row for number, row in enumerate(divided_texts(6).dataset) if number in (0, 1, 4, 5)]
    method = TokenAgreement(
        train_loader=DataLoader(some),
        generator=generator(),
        **FEW,
    )
    assert_alike(both, method(la).objective)


class Drawn(torch.utils.data.IterableDataset):
    """Each pass gives other texts."""

    def __init__(self):
        self.passes = []

    def __iter__(self):
        self.passes.append([])
        for batch in text_batches(seed=len(self.passes), batch_size=2):
            self.passes[-1].append(batch)
            yield batch


@pytest.mark.parametrize(
    ("method", "data", "options"),
    [
        (TokenAgreement, "train_loader", FEW),
        (TokenGridSearch, "val_loader", GRID),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_each_prior_precision_is_tried_on_the_same_texts(method, data, options, workers):
    la, drawn = fitted_text(), Drawn()
    given = DataLoader(drawn, batch_size=None, num_workers=workers)
    history = method(generator=generator(), **{data: given}, **options)(la)
    assert len(drawn.passes) == (workers == 0)
    texts = list(Drawn())
    expected = method(generator=generator(), **{data: texts}, **options)(la)
    assert torch.equal(history.objective, expected.objective)
    assert len(history.objective) > 3


def test_held_out_texts_choose():
    few = {"n_samples": 2, "grid_size": 9}
    texts = [{key: value[0] for key, value in one.items()} for one in text_batches(batch_size=1)]
    seen = []

    def train(examples):
        seen.extend(examples.indices)
        return another_training("gpt2").eval()

    la = fitted_text()
    la.optimize_prior_precision(
        method="second_training",
        train=train,
        train_loader=DataLoader(texts, batch_size=2),
        held_out=0.4,
        search=lambda **options: TokenGridSearch(generator=generator(3), **few, **options),
    )
    part = DataLoader([texts[place] for place in seen], batch_size=2)
    rest = DataLoader(
        [texts[place] for place in range(6) if place not in seen],
        batch_size=2,
    )
    other = fitted_text(another_training("gpt2").eval(), part)
    other.optimize_prior_precision(
        method="gridsearch",
        val_loader=rest,
        generator=generator(3),
        **few,
    )
    assert torch.equal(la.prior_precision, other.prior_precision)
    assert len(seen) == 4
