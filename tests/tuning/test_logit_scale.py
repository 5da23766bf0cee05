"""A scale of the logits beside the prior: what predicts by it, and how it is chosen."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from laplace_lora_ext import (
    GridSearch,
    LaplaceMixture,
    Moments,
    TuningHistory,
    from_pretrained,
)
from laplace_lora_ext.tuning import gridsearch
from laplace_lora_ext.tuning.losses import A_NAT, LOGIT_SCALES, PENALTY, Likelihoods
from tests.support.models import first_batch, ragged_batches, without_labels
from tests.support.posteriors import (
    GRID,
    another_training,
    count_forward_passes,
    fitted,
    generator,
    overconfident,
    plain_regression,
    validation_loss,
)
from tests.support.texts import fitted_text

SCALE = 2.5
# Both sides scale the same logits, in another order: they are apart by rounding alone.
ROUNDING = {"rtol": 1e-12, "atol": 1e-14}

Batch = dict[str, Tensor]


@pytest.fixture
def la():
    """A fitted posterior, whose scale is 1 as it is at first."""
    return fitted()


@pytest.fixture
def batch() -> Batch:
    """Texts to predict, the first that posteriors are fitted to."""
    batch = first_batch()
    return without_labels(batch)


# --- predictions ----------------------------------------------------------------------


def scaled(moments: Moments) -> Moments:
    """Multiply logits by `SCALE`, and so their covariances by its square."""
    return Moments(SCALE * moments.f_mu, SCALE**2 * moments.f_var)


@pytest.mark.parametrize(
    ("structure", "link"),
    [
        ("lowrank_kron", "probit"),
        ("lowrank_kron", "mean_field"),
        ("diag", "mc"),
        ("lowrank_kron", "bridge"),
        ("kron", "bridge_norm"),
    ],
)
def test_a_link_gets_scaled_logits(link, structure, batch):
    la = fitted(structure=structure)
    moments = la.predictive_moments(batch)

    def predict(x: Any) -> Tensor:
        torch.manual_seed(0)
        return la(x, link_approx=link, n_samples=50)

    expected = predict(scaled(moments))
    la.logit_scale = SCALE
    assert_close(predict(batch), expected, **ROUNDING)
    assert_close(predict(moments), expected, **ROUNDING)
    # Moments stay those of the model's own logits.
    assert torch.equal(la.predictive_moments(batch).f_var, moments.f_var)
    found = la.predict(batch, generator=generator())
    expected = la.predict(moments, generator=generator())
    assert_close(tuple(found), tuple(expected))


def test_without_variance_it_is_the_inverse_of_a_temperature(batch):
    la = fitted(prior_precision=1e15)
    expected = (SCALE * la.predictive_moments(batch).f_mu).softmax(-1)
    la.logit_scale = SCALE
    for link in ("probit", "mean_field", "mc"):
        assert_close(la(batch, link_approx=link), expected)
    assert_close(la.predict(batch).probabilities, expected)
    assert_close(la(batch, pred_type="nn", generator=generator()), expected)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_draws_and_functions_are_of_scaled_logits(la, batch, pred_type, tmp_path):
    options = {"pred_type": pred_type, "n_samples": 4}
    logits = la.functional_samples(batch, **options, generator=generator())
    of_function = la.function(seed=1, pred_type=pred_type)(batch)
    la.logit_scale = SCALE
    found = la.functional_samples(batch, **options, generator=generator())
    assert_close(found, SCALE * logits)
    probabilities = la.predictive_samples(batch, **options, generator=generator())
    assert_close(probabilities, found.softmax(-1))
    function = la.function(seed=1, pred_type=pred_type)
    assert_close(function(batch), SCALE * of_function)
    # Adapters lack it.
    with pytest.warns(UserWarning, match=r"by logit_scale, 2\.5"):
        la.sample_adapters(1, tmp_path)


def test_learnt_variances_are_scaled_with_the_logits(la, batch):
    exact = la(scaled(la.predictive_moments(batch)), link_approx="mean_field")
    options = {"pred_type": "amortized", "link_approx": "mean_field"}
    texts = ragged_batches()
    la.amortize(texts)
    unscaled = la(batch, **options)
    la.logit_scale = SCALE
    found = la(batch, **options)
    assert not torch.allclose(unscaled, found)
    # Learnt variances are a regression's, and only near those of the posterior.
    assert_close(found, exact, rtol=0.2, atol=0.02)
    # What is learnt is the same, whatever the scale.
    la.amortize(texts)
    assert_close(la(batch, **options), found)


def test_the_evidence_and_the_curvature_ignore_it(la, batch, tmp_path):
    evidence = la.log_marginal_likelihood()
    sums = la.state_dict()["H"]
    la.logit_scale = SCALE
    assert torch.equal(la.log_marginal_likelihood(), evidence)
    # Nor does a fit that comes after it.
    la.fit(ragged_batches())
    assert torch.equal(la.log_marginal_likelihood(), evidence)
    assert_close(la.state_dict()["H"], sums)
    # It is shown, saved, and moves with the model.
    assert "logit scale 2.5" in repr(la)
    la.save_pretrained(tmp_path)
    read = from_pretrained(la.model.model, tmp_path)
    assert torch.equal(read(batch), la(batch))
    before = la(batch)
    la.model.float()
    assert_close(la(batch).double(), before, rtol=1e-4, atol=1e-5)
    assert la.logit_scale == SCALE


def test_what_is_no_scale_is_refused(la):
    for value in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="logit_scale must be"):
            la.logit_scale = value
    assert la.logit_scale == 1
    # Without logits it names what to use.
    regression, _ = plain_regression()
    for other, instead in ((regression, "sigma_noise"), (fitted_text(), "draw_logits")):
        with pytest.raises(ValueError, match=f"use {instead}"):
            other.logit_scale = 2
        # What changes nothing is allowed.
        other.logit_scale = 1


# --- mixtures -------------------------------------------------------------------------


def test_a_mixture_multiplies_the_scales_of_its_members(batch, validation):
    first = fitted(prior_precision=2.0)
    second = fitted(model=another_training(), prior_precision=0.5)
    second.logit_scale = 3.0
    mixture = LaplaceMixture([first, second])
    mixture.logit_scale = 2.0
    assert [member.logit_scale for member in mixture.members] == [2, 6]
    # The posteriors that were given are left as they were.
    assert (first.logit_scale, second.logit_scale) == (1, 3)
    first.logit_scale = 2.0
    second.logit_scale = 6.0
    assert_close(mixture(batch), (first(batch) + second(batch)) / 2)
    # It chooses by the mean of its members.
    history = GridSearch(val_loader=validation, **GRID)(mixture)
    assert mixture.logit_scale == history.chosen.logit_scale
    assert history.objective.min() == pytest.approx(loss(mixture, validation), rel=1e-4)


# --- the choice -----------------------------------------------------------------------


def penalty_of(scale: float, batches: list[Batch]) -> float:
    """What a scale adds to the mean loss of some texts."""
    # As much for all texts together, however many there are.
    n_texts = sum(len(batch["labels"]) for batch in batches)
    return (PENALTY if scale > 1 else 0.0) * math.log(scale) ** 2 / n_texts


def loss(la: Any, batches: list[Batch], **predictions: Any) -> float:
    """Compute what a search minimises, at the present prior and scale."""
    options = {"link_approx": "mean_field"} | predictions
    mean = validation_loss(la, la.prior_precision, batches, **options)
    return mean + penalty_of(la.logit_scale, batches)


def underconfident(**keywords: Any):
    """Fit a posterior, and make texts of which its model is right, yet not sure."""
    la = fitted(**keywords)
    texts = ragged_batches(lengths=(7, 4, 5, 7, 3, 6, 2, 7) * 3, seed=7)
    for batch in texts:
        batch["labels"] = la.predictive_moments(batch).f_mu.argmax(-1)
    return la, texts


# Where the scale tells all, the best prior is the last.
@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
# One whose statistics serve every prior, and one whose don't.
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
@pytest.mark.parametrize("make_task", [overconfident, underconfident])
def test_the_pair_is_no_worse_than_the_temperature_alone_but_for_a_nat(
    make_task, structure
):
    la, texts = make_task(structure=structure)
    # Of an earlier search, say.
    la.logit_scale = SCALE
    priors_alone = GridSearch(val_loader=texts, optimize_scale=False, **GRID)(la)
    assert la.logit_scale == 1
    assert (priors_alone.logit_scale == 1).all()
    assert priors_alone.chosen.objective == pytest.approx(loss(la, texts), rel=1e-4)

    f_mu = torch.cat([la.predictive_moments(batch).f_mu for batch in texts])
    y = torch.cat([batch["labels"] for batch in texts])
    # From 0.04 to 20, so close to each other that the best is among them.
    of_temperatures = min(
        cross_entropy(scale * f_mu, y).item() + penalty_of(scale, texts)
        for scale in torch.logspace(math.log10(0.04), math.log10(20), 600).tolist()
    )
    passes = count_forward_passes(la)
    history = GridSearch(val_loader=texts, **GRID)(la)
    assert len(passes) == len(texts)
    lowest = history.chosen.objective
    # Between the scales that it tries, the search goes by a polynomial.
    assert lowest <= of_temperatures + A_NAT / len(y) + 1e-4
    # It is the loss of what is chosen, and the last that of the temperature alone.
    assert loss(la, texts) == pytest.approx(lowest, rel=1e-4)
    assert history.trials[-1].objective == pytest.approx(of_temperatures, rel=1e-4)
    if make_task is underconfident:
        # It is made surer, which no prior could do.
        assert lowest < priors_alone.chosen.objective - 0.05
        # The penalty decides: of the losses alone, the largest scale would.
        assert 1.5 < la.logit_scale < 6


def history_and_sums(search: GridSearch, la: Any) -> tuple[TuningHistory, Tensor]:
    """Search without setting anything; return what is chosen from, too."""
    found = []
    choose = gridsearch.expected_choice

    def note(grid: Tensor, sums: Tensor, *args: Any, **options: Any) -> Any:
        found.append(sums)
        return choose(grid, sums, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gridsearch, "expected_choice", note)
        return search.choose(la), found[0]


@pytest.mark.parametrize("link", ["mean_field", "probit", "mc"])
def test_the_loss_is_that_of_every_pair(la, validation, link):
    predictions = {"link_approx": link, "n_samples": 30}
    search = GridSearch(val_loader=validation, **predictions, **GRID)
    history, sums = history_and_sums(search, la)
    # As draws are of all texts together, these are one batch here.
    in_one_batch = ragged_batches(batch_size=8, seed=7)
    assert len(history.prior_precision) == GRID["grid_size"] + 1
    for point, prior in enumerate(history.prior_precision):
        la.prior_precision = prior
        objective = history.objective[point].item()
        for index in (0, 4, 6):
            la.logit_scale = LOGIT_SCALES[index]
            # All texts, priors and scales have one draw.
            draws = predictions | {"generator": generator(0)}
            expected = validation_loss(la, prior, in_one_batch, **draws)
            found = sums[point, index].item() / 8
            assert found == pytest.approx(expected, rel=1e-5)
            penalised = expected + penalty_of(la.logit_scale, validation)
            # Beyond rounding, no pair is better than what is chosen at its prior.
            assert objective <= penalised * (1 + 1e-6)


@pytest.mark.parametrize("link", ["mean_field", "probit"])
def test_the_choice_is_the_best_between_the_scales_too(link):
    la, texts = underconfident()
    search = GridSearch(val_loader=texts, link_approx=link, **GRID)
    search(la)
    chosen = la.logit_scale

    def loss_at(scale: float) -> float:
        la.logit_scale = scale
        return loss(la, texts, link_approx=link)

    lowest = loss_at(chosen)
    assert lowest < loss_at(0.98 * chosen)
    assert lowest < loss_at(1.02 * chosen)


# --- the penalty ----------------------------------------------------------------------


# Below 1, above it, and where there is nothing to choose between them.
@pytest.mark.parametrize(("best", "penalty"), [(-0.9, 0.0), (0.9, PENALTY), (0, 0)])
def test_scales_above_1_alone_have_a_penalty(best, penalty):
    curvature = 3.0
    logs = torch.tensor(LOGIT_SCALES, dtype=torch.float64).log()
    losses = curvature * (logs - best) ** 2
    score = Likelihoods("mean_field", 1, LOGIT_SCALES)
    found = score.best(torch.ones(1), losses, n_examples=2)
    # The loss a (log s - b)², with the penalty c (log s)², is least at a b / (a + c).
    expected = curvature * best / (curvature + penalty)
    assert math.log(found.logit_scale) == pytest.approx(expected, abs=1e-9)
    # Both are means over the two examples.
    of_scale = penalty * expected**2
    assert found.penalty == pytest.approx(of_scale / 2, abs=1e-9)
    objective = (curvature * (expected - best) ** 2 + of_scale) / 2
    assert found.objective == pytest.approx(objective, abs=1e-9)


# --- the edge of the grid -------------------------------------------------------------


def test_a_search_that_ends_without_variance_says_so():
    la, texts = underconfident()
    assert "without variance" not in repr(la)
    assert "do not vary" not in la.summary()
    with pytest.warns(UserWarning, match="the last"):
        GridSearch(val_loader=texts, optimize_scale=False)(la)
    with warnings.catch_warnings():
        # The last point is no fault where a scale is chosen.
        warnings.simplefilter("error")
        GridSearch(val_loader=texts)(la)
    # All other priors of this grid are far too broad.
    GridSearch(val_loader=30 * texts, log_prior_prec_max=-3, grid_size=2)(la)
    assert "without variance" in repr(la)
    assert "do not vary" in la.summary()
    prediction = la.predict(texts)
    assert not prediction.epistemic_entropy.any()
    assert prediction.total_entropy.all()
