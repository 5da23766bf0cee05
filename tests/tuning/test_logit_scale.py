"""A scale of the logits beside the prior: what predicts by it, and how it is chosen."""

import math
import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy, nll_loss, pad
from torch.testing import assert_close

from laplace_lora_ext import GridSearch, LaplaceMixture, Moments, ValGD, from_pretrained
from laplace_lora_ext.saving import read_state, write_state
from laplace_lora_ext.tuning.scales import (
    LOGIT_SCALES,
    PENALTY_ABOVE,
    PENALTY_BELOW,
    GridLosses,
    WithLogitScale,
)
from tests.support.models import lora_model, ragged_batches, without_labels
from tests.support.posteriors import (
    GRID,
    STRUCTURES,
    another_training,
    count_forward_passes,
    fitted,
    generator,
    overconfident,
    plain_regression,
)
from tests.support.texts import fitted_text

LINKS = ["probit", "mean_field", "mc", "bridge", "bridge_norm"]
SCALE = 2.5


# --- predictions ----------------------------------------------------------------------


def scaled(moments: Moments) -> Moments:
    """Multiply logits by `SCALE`, and so their covariances by its square."""
    f_mu, f_var = moments
    return Moments(SCALE * f_mu, SCALE**2 * f_var)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("link", LINKS)
def test_a_link_gets_scaled_logits(link, structure):
    la = fitted(structure=structure)
    batch = without_labels(ragged_batches()[0])
    moments = la.predictive_moments(batch)

    def predict(x):
        torch.manual_seed(0)
        return la(x, link_approx=link, n_samples=50)

    expected = predict(scaled(moments))
    la.logit_scale = SCALE
    assert_close(predict(batch), expected, rtol=1e-12, atol=1e-14)
    assert_close(predict(moments), expected, rtol=1e-12, atol=1e-14)
    # Moments stay those of the model's own logits.
    assert torch.equal(la.predictive_moments(batch).f_var, moments.f_var)


def test_without_variance_it_is_the_inverse_of_a_temperature():
    la = fitted(prior_precision=1e15)
    batch = ragged_batches()[0]
    logits = la.predictive_moments(batch).f_mu
    expected = (SCALE * logits).softmax(-1)
    la.logit_scale = SCALE
    for link in ("probit", "mean_field", "mc"):
        assert_close(la(batch, link_approx=link), expected)
    assert_close(la.predict(batch).probabilities, expected)
    by_networks = la(batch, pred_type="nn", generator=generator())
    assert_close(by_networks, expected)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_draws_are_of_scaled_logits(pred_type):
    la = fitted()
    batch = without_labels(ragged_batches()[0])
    draws = {"pred_type": pred_type, "n_samples": 4}
    logits = la.functional_samples(batch, generator=generator(), **draws)
    la.logit_scale = SCALE
    found = la.functional_samples(batch, generator=generator(), **draws)
    assert_close(found, SCALE * logits)
    probabilities = la.predictive_samples(batch, generator=generator(), **draws)
    assert_close(probabilities, found.softmax(-1))


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_a_function_is_of_scaled_logits(pred_type):
    la = fitted()
    batch = without_labels(ragged_batches()[0])
    logits = la.function(seed=1, pred_type=pred_type)(batch)
    la.logit_scale = SCALE
    function = la.function(seed=1, pred_type=pred_type)
    assert_close(function(batch), SCALE * logits)


def test_decisions_draw_scaled_logits():
    la = fitted()
    batch = ragged_batches()[0]
    moments = la.predictive_moments(batch)
    expected = la.predict(scaled(moments), generator=generator())
    la.logit_scale = SCALE
    found = la.predict(batch, generator=generator())
    assert_close(tuple(found), tuple(expected))


def test_learnt_variances_are_scaled_with_the_logits():
    la = fitted()
    batches = ragged_batches()
    moments = la.predictive_moments(batches[0])
    exact = la(scaled(moments), link_approx="mean_field")

    def predict():
        return la(batches[0], pred_type="amortized", link_approx="mean_field")

    la.amortize(batches)
    unscaled = predict()
    la.logit_scale = SCALE
    found = predict()
    assert not torch.allclose(unscaled, found)
    # Learnt variances are a regression's, and only near those of the posterior.
    assert_close(found, exact, rtol=0.2, atol=0.02)
    la.amortize(batches)  # the same, whatever the scale
    assert_close(predict(), found)


def test_the_evidence_and_the_curvature_ignore_it():
    la = fitted()
    evidence = la.log_marginal_likelihood()
    sums = la.state_dict()["H"]
    la.logit_scale = SCALE
    assert torch.equal(la.log_marginal_likelihood(), evidence)
    la.fit(ragged_batches())
    assert torch.equal(la.log_marginal_likelihood(), evidence)
    assert_close(la.state_dict()["H"], sums)
    assert la.logit_scale == SCALE


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, torch.ones(2)])
def test_what_is_no_scale_is_refused(value):
    la = fitted()
    with pytest.raises(ValueError, match="logit_scale must be"):
        la.logit_scale = value
    assert la.logit_scale == 1


def regression():
    la, _ = plain_regression()
    return la


@pytest.mark.parametrize(
    ("make_la", "message"),
    [
        pytest.param(
            regression,
            "regression has no logit_scale: use sigma_noise",
            id="regression",
        ),
        pytest.param(
            fitted_text,
            "language_modeling has no logit_scale: use the temp",
            id="text",
        ),
    ],
)
def test_where_there_are_no_logits_it_names_what_to_use(make_la, message):
    la = make_la()
    with pytest.raises(ValueError, match=message):
        la.logit_scale = 2
    la.logit_scale = 1


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_is_saved_and_shown(structure, tmp_path):
    la = fitted(structure=structure)
    model = la.model.model
    assert "logit scale" not in repr(la)
    la.logit_scale = SCALE
    assert "logit scale 2.5" in repr(la)

    la.save_pretrained(tmp_path)
    read = from_pretrained(model, tmp_path)
    batch = ragged_batches()[0]
    assert read.logit_scale == SCALE
    assert torch.equal(read(batch), la(batch))

    state = read_state(tmp_path)
    del state["logit_scale"]  # as earlier releases wrote it
    write_state(state, tmp_path)
    assert from_pretrained(model, tmp_path).logit_scale == 1


def test_it_moves_with_the_model():
    la = fitted(model=lora_model("bert", torch.float32))
    la.logit_scale = SCALE
    batch = ragged_batches()[0]
    before = la(batch)
    la.model.model.double()
    assert_close(la(batch).float(), before.float(), rtol=1e-4, atol=1e-5)
    assert la.logit_scale == SCALE


def test_drawn_adapters_lack_it_which_is_said(tmp_path):
    la = fitted()
    la.logit_scale = SCALE
    with pytest.warns(UserWarning, match=r"sample_0 by logit_scale, 2\.5"):
        la.sample_adapters(1, tmp_path)


# --- mixtures -------------------------------------------------------------------------


@pytest.fixture
def two_trainings():
    """Posteriors of two trainings, with scales of 1 and 3."""
    first = fitted(prior_precision=2.0)
    second = fitted(model=another_training(), prior_precision=0.5)
    second.logit_scale = 3.0
    return first, second


def test_a_mixture_multiplies_the_scales_of_its_members(two_trainings):
    first, second = two_trainings
    mixture = LaplaceMixture([first, second])
    assert mixture.logit_scale == 1
    mixture.logit_scale = 2.0
    assert [member.logit_scale for member in mixture.members] == [2, 6]
    # The posteriors that were given are left as they were.
    assert first.logit_scale == 1
    assert second.logit_scale == 3
    first.logit_scale = 2.0
    second.logit_scale = 6.0
    batch = ragged_batches()[0]
    mean = (first(batch) + second(batch)) / 2
    assert_close(mixture(batch), mean)


def test_a_mixture_chooses_by_the_mean_of_its_members(two_trainings):
    mixture = LaplaceMixture(two_trainings)
    texts = ragged_batches(seed=7)
    history = mixture.optimize_prior_precision(val_loader=texts, **GRID)
    best = history.objective.argmin()
    assert mixture.logit_scale == history.logit_scale[best].item()
    loss = penalised_loss(mixture, texts)
    assert history.objective[best].item() == pytest.approx(loss, rel=1e-4)

    statistics = mixture.predictive_statistics(texts)
    again = mixture.optimize_prior_precision(val_loader=statistics, **GRID)
    assert_close(again.objective, history.objective, rtol=1e-6, atol=0)


# --- the choice -----------------------------------------------------------------------


def penalty_of(scale: float, batches) -> float:
    """What a scale adds to the mean loss of some texts."""
    factor = PENALTY_ABOVE if scale > 1 else PENALTY_BELOW
    return factor * math.log(scale) ** 2 / size(batches)


def size(batches) -> int:
    return sum(len(batch["labels"]) for batch in batches)


def mean_loss(la, batches, link_approx="mean_field", **options) -> float:
    """Average over examples, by predictions from the inputs."""
    losses = []
    for batch in batches:
        log_p = la(batch, link_approx=link_approx, **options).double().log()
        losses.append(nll_loss(log_p, batch["labels"], reduction="none"))
    return torch.cat(losses).mean().item()


def penalised_loss(la, batches, **options) -> float:
    """Compute what a search minimises, at the present prior and scale."""
    return mean_loss(la, batches, **options) + penalty_of(la.logit_scale, batches)


def underconfident(**keywords):
    """Fit a posterior, and make texts of which its model is right, yet not sure."""
    la = fitted(**keywords)
    texts = ragged_batches(lengths=(7, 4, 5, 7, 3, 6, 2, 7) * 3, seed=7)
    for batch in texts:
        batch["labels"] = la.predictive_moments(batch).f_mu.argmax(-1)
    return la, texts


TASKS = {"too sure": overconfident, "not sure enough": underconfident}


def best_of_temperatures(la, texts) -> float:
    """Compute the lowest penalised loss of the model alone, over all scales."""
    logits = torch.cat([la.predictive_moments(batch).f_mu for batch in texts])
    labels = torch.cat([batch["labels"] for batch in texts])
    losses = []
    for scale in torch.logspace(math.log10(0.2), math.log10(20), 400).tolist():
        loss = cross_entropy(scale * logits, labels).item()
        losses.append(loss + penalty_of(scale, texts))
    return min(losses)


@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
@pytest.mark.parametrize("task", TASKS)
def test_it_is_never_worse_than_the_prior_or_the_temperature_alone(task, structure):
    la, texts = TASKS[task](structure=structure)
    search = GridSearch(val_loader=texts, optimize_scale=False, **GRID)
    of_priors = search(la).objective.min().item()
    assert la.logit_scale == 1
    of_temperatures = best_of_temperatures(la, texts)

    passes = count_forward_passes(la)
    search = GridSearch(val_loader=texts, **GRID)
    objective = search(la).objective
    if structure == "lowrank_kron":  # which has statistics: one pass a batch
        assert len(passes) == len(texts)
    best = objective.min().item()
    # Between the scales that it tries, the search goes by a polynomial.
    assert best <= of_priors + 1e-4
    assert best <= of_temperatures + 1e-4
    if task == "not sure enough":
        assert best < of_priors - 0.05
        assert la.logit_scale > 1.5
    assert penalised_loss(la, texts) == pytest.approx(best, rel=1e-4)
    # Without variance, the last point is the best temperature.
    assert objective[-1].item() == pytest.approx(of_temperatures, rel=1e-4)


@pytest.mark.parametrize("link", ["mean_field", "probit", "mc"])
def test_the_loss_is_that_of_every_pair(link):
    la = fitted()
    texts = ragged_batches(seed=7)
    predictions = {"link_approx": link, "n_samples": 30}
    search = GridSearch(val_loader=texts, **predictions, **GRID)
    torch.manual_seed(0)
    history = search(la)
    # The search draws a seed, by which all texts, priors and scales have one draw.
    torch.manual_seed(0)
    seed = torch.randint(2**31, ()).item()
    data = [joined(texts)] if link == "mc" else texts
    assert len(history.prior_precision) == GRID["grid_size"] + 1
    for point, prior in enumerate(history.prior_precision):
        la.prior_precision = prior
        objective = history.objective[point].item()
        for index in (0, 4, 6):
            la.logit_scale = float(LOGIT_SCALES[index])
            loss = mean_loss(la, data, generator=generator(seed), **predictions)
            found = history.losses.sums[point, index].item() / size(texts)
            assert found == pytest.approx(loss, rel=1e-5)
            penalised = loss + penalty_of(la.logit_scale, texts)
            assert objective <= penalised * (1 + 1e-6)


def joined(batches):
    """Pad batches to one."""
    length = max(batch["input_ids"].shape[1] for batch in batches)
    whole = {}
    for key in batches[0]:
        columns = []
        for batch in batches:
            column = batch[key]
            if column.ndim == 2:
                n_missing = length - column.shape[1]
                column = pad(column, (0, n_missing))
            columns.append(column)
        whole[key] = torch.cat(columns)
    return whole


@pytest.mark.parametrize("link", ["mean_field", "probit"])
def test_the_choice_is_the_best_between_the_scales_too(link):
    la, texts = underconfident()
    search = GridSearch(val_loader=texts, link_approx=link, **GRID)
    search(la)
    chosen = la.logit_scale
    losses = {}
    for factor in (0.98, 1.0, 1.02):
        la.logit_scale = factor * chosen
        losses[factor] = penalised_loss(la, texts, link_approx=link)
    assert losses[1.0] < losses[0.98]
    assert losses[1.0] < losses[1.02]


@pytest.mark.parametrize(
    ("factor", "best", "expected"),
    [
        # The loss a (log s - b)², with the penalty c (log s)², is least at a b / (a +
        # c).
        pytest.param(3.0, -0.9, 3 * -0.9 / (3 + PENALTY_BELOW), id="below 1"),
        pytest.param(3.0, 0.9, 3 * 0.9 / (3 + PENALTY_ABOVE), id="above 1"),
        pytest.param(3.0, 0.0, 0.0, id="at 1"),
    ],
)
def test_each_side_of_1_has_a_penalty_of_its_own(factor, best, expected):
    logs = torch.from_numpy(LOGIT_SCALES).log()
    sums = factor * (logs - best) ** 2
    score = WithLogitScale("mean_field", n_samples=1, seed=0)
    found = score.best(sums, n_examples=2)
    assert found.logit_scale is not None
    assert math.log(found.logit_scale) == pytest.approx(expected, abs=1e-9)
    of_sums = factor * (expected - best) ** 2
    side = PENALTY_BELOW if best < 0 else PENALTY_ABOVE
    penalty = side * expected**2
    assert found.penalty == pytest.approx(penalty / 2, abs=1e-9)
    assert found.objective == pytest.approx((of_sums + penalty) / 2, abs=1e-9)


def test_a_few_texts_that_are_all_right_do_not_ask_for_the_largest_scale():
    la, texts = underconfident()
    assert size(texts) < 30  # few enough for the penalty to decide
    search = GridSearch(val_loader=texts)
    history = search(la)
    assert 1 < la.logit_scale < 6
    best = history.objective.argmin()
    without_penalty = history.losses.sums[best].argmin()
    assert LOGIT_SCALES[without_penalty] == 20


def own_loss(probabilities, y):
    return nll_loss(probabilities.log(), y)


@pytest.mark.parametrize(
    ("options", "link"),
    [
        pytest.param({"optimize_scale": False}, "mean_field", id="by the user's wish"),
        pytest.param({"loss": own_loss}, "mean_field", id="own loss"),
        pytest.param({"link_approx": "bridge"}, "bridge", id="bridge"),
    ],
)
def test_other_searches_score_the_present_scale(options, link):
    la = fitted()
    la.logit_scale = SCALE
    texts = ragged_batches(seed=7)
    search = GridSearch(val_loader=texts, **options, **GRID)
    history = search(la)
    assert la.logit_scale == SCALE
    assert history.logit_scale is None
    assert len(history.objective) == GRID["grid_size"]
    la.prior_precision = history.prior_precision[0]
    expected = mean_loss(la, texts, link_approx=link)
    assert history.objective[0].item() == pytest.approx(expected, rel=1e-5)


def test_a_search_by_drawn_networks_leaves_the_present_scale():
    la = fitted()
    la.logit_scale = SCALE
    texts = ragged_batches(seed=7)
    search = GridSearch(val_loader=texts, pred_type="nn", n_samples=2, **GRID)
    torch.manual_seed(0)
    history = search(la)
    assert la.logit_scale == SCALE
    assert history.logit_scale is None
    assert len(history.objective) == GRID["grid_size"]


def test_a_descent_scores_the_present_scale():
    la = fitted()
    la.logit_scale = SCALE
    texts = ragged_batches(seed=7)
    expected = mean_loss(la, texts)
    descent = ValGD(val_loader=texts, n_steps=1)
    history = descent(la)
    assert history.objective[0].item() == pytest.approx(expected, rel=1e-5)
    assert la.logit_scale == SCALE


def test_a_search_that_fails_leaves_the_scale_as_it_was(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(GridLosses, "choose", fail)
    la = fitted()
    la.logit_scale = SCALE
    search = GridSearch(val_loader=ragged_batches(seed=7), **GRID)
    with pytest.raises(ZeroDivisionError):
        search(la)
    assert la.logit_scale == SCALE
    assert la.prior_precision.tolist() == [1]


def test_the_last_point_is_no_fault_where_a_scale_is_chosen():
    la, texts = underconfident()
    search = GridSearch(val_loader=texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = search(la)
    assert history.objective.argmin() > 90
    of_priors_alone = GridSearch(val_loader=texts, optimize_scale=False)
    with pytest.warns(UserWarning, match="the last"):
        of_priors_alone(la)
