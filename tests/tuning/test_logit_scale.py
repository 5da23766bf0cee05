"""A scale of the logits beside the prior: what predicts by it, and how it is chosen."""

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, nll_loss
from torch.testing import assert_close

from laplace_lora_ext import (
    GridSearch,
    LaplaceMixture,
    Moments,
    from_pretrained,
)
from laplace_lora_ext.saving import read_state, write_state
from laplace_lora_ext.tuning.scales import LOGIT_SCALES, PENALTY, ClassLosses
from tests.support.models import (
    first_batch,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import (
    GRID,
    OURS_AND_A_HOSTS,
    another_training,
    count_forward_passes,
    fitted,
    generator,
    overconfident,
    plain_regression,
    with_structures,
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
    return Moments(
        f_mu=SCALE * moments.f_mu,
        f_var=SCALE**2 * moments.f_var,
    )


@pytest.mark.parametrize(
    ("structure", "link"),
    with_structures(["probit", "mean_field", "mc", "bridge", "bridge_norm"]),
)
def test_a_link_gets_scaled_logits(link, structure, batch):
    la = fitted(structure=structure)
    moments = la.predictive_moments(batch)

    def predict(x: Any) -> Tensor:
        torch.manual_seed(0)
        return la(x, link_approx=link, n_samples=50)

    of_scaled = scaled(moments)
    expected = predict(of_scaled)
    la.logit_scale = SCALE
    of_batch = predict(batch)
    of_moments = predict(moments)
    assert_close(of_batch, expected, **ROUNDING)
    assert_close(of_moments, expected, **ROUNDING)
    # Moments stay those of the model's own logits.
    after = la.predictive_moments(batch)
    assert torch.equal(after.f_var, moments.f_var)


def test_without_variance_it_is_the_inverse_of_a_temperature(batch):
    la = fitted(prior_precision=1e15)
    moments = la.predictive_moments(batch)
    scaled_logits = SCALE * moments.f_mu
    expected = scaled_logits.softmax(-1)
    la.logit_scale = SCALE
    for link in ("probit", "mean_field", "mc"):
        by_link = la(batch, link_approx=link)
        assert_close(by_link, expected)
    prediction = la.predict(batch)
    assert_close(prediction.probabilities, expected)
    by_networks = la(
        batch,
        pred_type="nn",
        generator=generator(),
    )
    assert_close(by_networks, expected)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_draws_are_of_scaled_logits(la, batch, pred_type):
    def draw(sample: Callable) -> Tensor:
        return sample(
            batch,
            pred_type=pred_type,
            n_samples=4,
            generator=generator(),
        )

    logits = draw(la.functional_samples)
    la.logit_scale = SCALE
    found = draw(la.functional_samples)
    assert_close(found, SCALE * logits)
    probabilities = draw(la.predictive_samples)
    assert_close(probabilities, found.softmax(-1))


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_a_function_is_of_scaled_logits(la, batch, pred_type):
    unscaled = la.function(seed=1, pred_type=pred_type)
    # It computes nothing before it is called, which here is before the scale is set.
    logits = unscaled(batch)
    la.logit_scale = SCALE
    function = la.function(seed=1, pred_type=pred_type)
    assert_close(function(batch), SCALE * logits)


def test_decisions_draw_scaled_logits(la, batch):
    moments = la.predictive_moments(batch)
    of_scaled = scaled(moments)
    expected = la.predict(of_scaled, generator=generator())
    la.logit_scale = SCALE
    found = la.predict(batch, generator=generator())
    assert_close(tuple(found), tuple(expected))


def test_learnt_variances_are_scaled_with_the_logits(la, batch):
    moments = la.predictive_moments(batch)
    of_scaled = scaled(moments)
    exact = la(of_scaled, link_approx="mean_field")

    def predict() -> Tensor:
        return la(
            batch,
            pred_type="amortized",
            link_approx="mean_field",
        )

    texts = ragged_batches()
    la.amortize(texts)
    unscaled = predict()
    la.logit_scale = SCALE
    found = predict()
    assert not torch.allclose(unscaled, found)
    # Learnt variances are a regression's, and only near those of the posterior.
    assert_close(found, exact, rtol=0.2, atol=0.02)
    # What is learnt is the same, whatever the scale.
    la.amortize(texts)
    assert_close(predict(), found)


def test_the_evidence_and_the_curvature_ignore_it(la):
    evidence = la.log_marginal_likelihood()
    sums = la.state_dict()["H"]
    la.logit_scale = SCALE
    of_scaled = la.log_marginal_likelihood()
    assert torch.equal(of_scaled, evidence)
    # Nor does a fit that comes after it.
    la.fit(ragged_batches())
    of_refitted = la.log_marginal_likelihood()
    assert torch.equal(of_refitted, evidence)
    state = la.state_dict()
    assert_close(state["H"], sums)
    assert la.logit_scale == SCALE


@pytest.mark.parametrize(
    "value",
    [
        0.0,
        -1.0,
        math.nan,
        math.inf,
        torch.ones(2),
    ],
)
def test_what_is_no_scale_is_refused(la, value):
    with pytest.raises(ValueError, match="logit_scale must be"):
        la.logit_scale = value
    assert la.logit_scale == 1


def regression():
    """Fit a posterior of numbers."""
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
            "language_modeling has no logit_scale: use draw_logits",
            id="text",
        ),
    ],
)
def test_where_there_are_no_logits_it_names_what_to_use(make_la, message):
    la = make_la()
    with pytest.raises(ValueError, match=message):
        la.logit_scale = 2
    # What changes nothing is allowed.
    la.logit_scale = 1


def test_it_is_shown_where_it_is_not_1(la):
    assert "logit scale" not in repr(la)
    la.logit_scale = SCALE
    assert "logit scale 2.5" in repr(la)


@pytest.mark.parametrize("structure", OURS_AND_A_HOSTS)
def test_it_is_saved(structure, batch, tmp_path):
    la = fitted(structure=structure)
    la.logit_scale = SCALE
    la.save_pretrained(tmp_path)
    model = la.model.model
    read = from_pretrained(model, tmp_path)
    assert read.logit_scale == SCALE
    expected = la(batch)
    assert torch.equal(read(batch), expected)


def test_what_is_saved_without_a_scale_has_a_scale_of_1(tmp_path):
    la = fitted()
    la.logit_scale = SCALE
    la.save_pretrained(tmp_path)
    # As earlier releases wrote it.
    state = read_state(tmp_path)
    del state["logit_scale"]
    write_state(state, tmp_path)
    read = from_pretrained(la.model.model, tmp_path)
    assert read.logit_scale == 1


def test_it_moves_with_the_model(batch):
    model = lora_model("bert", torch.float32)
    la = fitted(model=model)
    la.logit_scale = SCALE
    before = la(batch)
    model.double()
    after = la(batch).float()
    # As near as float32 is to float64.
    assert_close(after, before.float(), rtol=1e-4, atol=1e-5)
    assert la.logit_scale == SCALE


def test_drawn_adapters_lack_it_which_is_said(la, tmp_path):
    la.logit_scale = SCALE
    message = r"by logit_scale, 2\.5"
    with pytest.warns(UserWarning, match=message):
        la.sample_adapters(1, tmp_path)


# --- mixtures -------------------------------------------------------------------------


class Trainings(NamedTuple):
    """Posteriors of two trainings, with scales of 1 and 3."""

    first: Any
    second: Any


@pytest.fixture
def trainings() -> Trainings:
    first = fitted(prior_precision=2.0)
    model = another_training()
    second = fitted(model=model, prior_precision=0.5)
    second.logit_scale = 3.0
    return Trainings(first, second)


def test_a_mixture_multiplies_the_scales_of_its_members(trainings):
    mixture = LaplaceMixture(trainings)
    assert mixture.logit_scale == 1
    mixture.logit_scale = 2.0
    scales = [member.logit_scale for member in mixture.members]
    assert scales == [2, 6]
    # The posteriors that were given are left as they were.
    assert trainings.first.logit_scale == 1
    assert trainings.second.logit_scale == 3


def test_a_scaled_mixture_averages_scaled_members(trainings, batch):
    first, second = trainings
    mixture = LaplaceMixture(trainings)
    mixture.logit_scale = 2.0
    first.logit_scale = 2.0
    second.logit_scale = 6.0
    of_both = torch.stack([first(batch), second(batch)])
    assert_close(mixture(batch), of_both.mean(0))


def test_a_mixture_chooses_by_the_mean_of_its_members(trainings, validation):
    mixture = LaplaceMixture(trainings)
    history = mixture.optimize_prior_precision(
        val_loader=validation,
        **GRID,
    )
    best = history.objective.argmin()
    chosen = history.logit_scale[best].item()
    assert mixture.logit_scale == chosen
    loss = penalised_loss(mixture, validation)
    lowest = history.objective[best].item()
    assert lowest == pytest.approx(loss, rel=1e-4)


def test_a_mixture_chooses_by_statistics_as_by_texts(trainings, validation):
    mixture = LaplaceMixture(trainings)

    def objective(data: Any) -> Tensor:
        history = mixture.optimize_prior_precision(
            val_loader=data,
            **GRID,
        )
        return history.objective

    by_texts = objective(validation)
    statistics = mixture.predictive_statistics(validation)
    by_statistics = objective(statistics)
    assert_close(by_statistics, by_texts, rtol=1e-6, atol=0)


# --- the choice -----------------------------------------------------------------------


def size(batches: list[Batch]) -> int:
    """Count the texts of batches."""
    return sum(len(batch["labels"]) for batch in batches)


def penalty_of(
    scale: float,
    batches: list[Batch],
) -> float:
    """What a scale adds to the mean loss of some texts."""
    factor = PENALTY if scale > 1 else 0.0
    squared_log = math.log(scale) ** 2
    # As much for all texts together, however many there are.
    return factor * squared_log / size(batches)


def mean_loss(
    la: Any,
    batches: list[Batch],
    link_approx: str = "mean_field",
    **options: Any,
) -> float:
    """Average over examples, by predictions from the inputs."""
    losses = []
    for batch in batches:
        probabilities = la(
            batch,
            link_approx=link_approx,
            **options,
        )
        log_p = probabilities.double().log()
        of_texts = nll_loss(log_p, batch["labels"], reduction="none")
        losses.append(of_texts)
    return torch.cat(losses).mean().item()


def penalised_loss(
    la: Any,
    batches: list[Batch],
    **options: Any,
) -> float:
    """Compute what a search minimises, at the present prior and scale."""
    loss = mean_loss(la, batches, **options)
    penalty = penalty_of(la.logit_scale, batches)
    return loss + penalty


def underconfident(**keywords: Any):
    """Fit a posterior, and make texts of which its model is right, yet not sure."""
    la = fitted(**keywords)
    texts = ragged_batches(
        lengths=(7, 4, 5, 7, 3, 6, 2, 7) * 3,
        seed=7,
    )
    for batch in texts:
        moments = la.predictive_moments(batch)
        batch["labels"] = moments.f_mu.argmax(-1)
    return la, texts


def lowest_of_temperatures(
    la: Any,
    texts: list[Batch],
) -> float:
    """Compute the lowest penalised loss of the model alone, over all scales."""
    logits = []
    labels = []
    for batch in texts:
        moments = la.predictive_moments(batch)
        logits.append(moments.f_mu)
        labels.append(batch["labels"])
    f_mu = torch.cat(logits)
    y = torch.cat(labels)
    losses = []
    # From 0.04 to 20, so close to each other that the best is among them.
    lowest = math.log10(0.04)
    highest = math.log10(20)
    exponents = torch.linspace(lowest, highest, 600)
    for exponent in exponents.tolist():
        scale = 10**exponent
        loss = cross_entropy(scale * f_mu, y).item()
        penalty = penalty_of(scale, texts)
        losses.append(loss + penalty)
    return min(losses)


@dataclass(frozen=True)
class Searched:
    """A posterior whose prior and scale were searched, and what is to be compared."""

    la: Any
    texts: list[Batch]
    objective: Tensor
    n_passes: int
    lowest_of_priors: float
    lowest_of_temperatures: float

    @property
    def lowest(self) -> float:
        """The loss of what the search has chosen."""
        return self.objective.min().item()


TASKS = {
    "too sure": overconfident,
    "not sure enough": underconfident,
}
# One whose statistics serve every prior, and one whose don't.
STRUCTURES_TO_SEARCH = ["lowrank_kron", "diag"]


# Of the module, for each test asks something else of the same search.
@pytest.fixture(
    scope="module",
    params=itertools.product(TASKS, STRUCTURES_TO_SEARCH),
    ids=str,
)
def searched(request: pytest.FixtureRequest) -> Searched:
    """A search of priors alone, and then of priors and scales."""
    task, structure = request.param
    make_task = TASKS[task]
    la, texts = make_task(structure=structure)
    search_priors = GridSearch(
        val_loader=texts,
        optimize_scale=False,
        **GRID,
    )
    of_priors = search_priors(la).objective
    assert la.logit_scale == 1
    of_temperatures = lowest_of_temperatures(la, texts)

    passes = count_forward_passes(la)
    search = GridSearch(val_loader=texts, **GRID)
    history = search(la)
    return Searched(
        la=la,
        texts=texts,
        objective=history.objective,
        n_passes=len(passes),
        lowest_of_priors=of_priors.min().item(),
        lowest_of_temperatures=of_temperatures,
    )


# Where the scale tells all, the best prior is the last.
may_end_at_the_grids_edge = pytest.mark.filterwarnings(
    "ignore:The best prior precision of the grid"
)


@may_end_at_the_grids_edge
def test_it_is_never_worse_than_the_prior_or_the_temperature_alone(searched):
    # Between the scales that it tries, the search goes by a polynomial.
    of_polynomial = 1e-4
    assert searched.lowest <= searched.lowest_of_priors + of_polynomial
    assert searched.lowest <= searched.lowest_of_temperatures + of_polynomial


@may_end_at_the_grids_edge
def test_the_objective_is_the_loss_of_what_is_chosen(searched):
    loss = penalised_loss(searched.la, searched.texts)
    assert loss == pytest.approx(searched.lowest, rel=1e-4)


@may_end_at_the_grids_edge
def test_without_variance_the_last_point_is_the_best_temperature(searched):
    last = searched.objective[-1].item()
    expected = searched.lowest_of_temperatures
    assert last == pytest.approx(expected, rel=1e-4)


@may_end_at_the_grids_edge
@pytest.mark.parametrize(
    "searched",
    list(itertools.product(["not sure enough"], STRUCTURES_TO_SEARCH)),
    indirect=True,
    ids=str,
)
def test_a_model_that_is_not_sure_enough_is_made_surer(searched):
    # Which no prior could do.
    assert searched.lowest < searched.lowest_of_priors - 0.05
    assert searched.la.logit_scale > 1.5


@may_end_at_the_grids_edge
def test_a_search_needs_one_pass_a_batch(searched):
    assert searched.n_passes == len(searched.texts)


@pytest.mark.parametrize("link", ["mean_field", "probit", "mc"])
def test_the_loss_is_that_of_every_pair(la, validation, link):
    predictions = {"link_approx": link, "n_samples": 30}
    search = GridSearch(
        val_loader=validation,
        **predictions,
        **GRID,
    )
    history = search(la)
    # As draws are of all texts together, these are one batch here.
    in_one_batch = ragged_batches(batch_size=8, seed=7)
    n_texts = size(validation)
    assert len(history.prior_precision) == GRID["grid_size"] + 1
    for point, prior in enumerate(history.prior_precision):
        la.prior_precision = prior
        objective = history.objective[point].item()
        for index in (0, 4, 6):
            la.logit_scale = LOGIT_SCALES[index]
            loss = mean_loss(
                la,
                in_one_batch,
                # All texts, priors and scales have one draw.
                generator=generator(0),
                **predictions,
            )
            sum_of_losses = history.losses.sums[point, index].item()
            assert sum_of_losses / n_texts == pytest.approx(loss, rel=1e-5)
            penalty = penalty_of(la.logit_scale, validation)
            # Beyond rounding, no pair is better than what is chosen at its prior.
            penalised = loss + penalty
            assert objective <= penalised * (1 + 1e-6)


@pytest.mark.parametrize("link", ["mean_field", "probit"])
def test_the_choice_is_the_best_between_the_scales_too(link):
    la, texts = underconfident()
    search = GridSearch(
        val_loader=texts,
        link_approx=link,
        **GRID,
    )
    search(la)
    chosen = la.logit_scale

    def loss_at(scale: float) -> float:
        la.logit_scale = scale
        return penalised_loss(la, texts, link_approx=link)

    lowest = loss_at(chosen)
    assert lowest < loss_at(0.98 * chosen)
    assert lowest < loss_at(1.02 * chosen)


# --- the penalty ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("best", "penalty"),
    [
        pytest.param(-0.9, 0.0, id="below 1"),
        pytest.param(0.9, PENALTY, id="above 1"),
        # Where there is nothing to choose between them.
        pytest.param(0.0, PENALTY, id="at 1"),
    ],
)
def test_scales_above_1_alone_have_a_penalty(best, penalty):
    curvature = 3.0
    logs = torch.tensor(LOGIT_SCALES, dtype=torch.float64).log()
    losses = curvature * (logs - best) ** 2
    score = ClassLosses("mean_field", 1, LOGIT_SCALES)
    found = score.best(losses, n_examples=2)
    # The loss a (log s - b)², with the penalty c (log s)², is least at a b / (a + c).
    expected = curvature * best / (curvature + penalty)
    assert found.logit_scale is not None
    log_scale = math.log(found.logit_scale)
    assert log_scale == pytest.approx(expected, abs=1e-9)
    loss = curvature * (expected - best) ** 2
    of_scale = penalty * expected**2
    # Both are means over the two examples.
    assert found.penalty == pytest.approx(of_scale / 2, abs=1e-9)
    objective = (loss + of_scale) / 2
    assert found.objective == pytest.approx(objective, abs=1e-9)


@pytest.mark.parametrize("temperature", [0.5, 2.0, 10.0, 20.0])
def test_a_temperature_is_found_that_the_logits_ask_for(temperature):
    torch.manual_seed(0)
    logits = torch.randn(3000, 4, dtype=torch.float64)
    labels = torch.distributions.Categorical(logits=logits).sample()
    # Far surer than right, or less sure.
    stretched = temperature * logits
    losses = [
        cross_entropy(scale * stretched, labels, reduction="sum")
        for scale in LOGIT_SCALES
    ]
    score = ClassLosses("mean_field", 1, LOGIT_SCALES)
    found = score.best(torch.stack(losses), len(labels))
    assert found.logit_scale is not None
    # Three thousand labels tell the scale to about a fiftieth.
    assert found.logit_scale * temperature == pytest.approx(1, abs=0.1)
    chosen = cross_entropy(found.logit_scale * stretched, labels).item()
    # A spline is least exact at its ends.
    assert found.objective - found.penalty == pytest.approx(chosen, abs=3e-4)


def test_a_few_texts_that_are_all_right_do_not_ask_for_the_largest_scale():
    la, texts = underconfident()
    # Few enough for the penalty to decide.
    assert size(texts) < 30
    search = GridSearch(val_loader=texts)
    history = search(la)
    assert 1 < la.logit_scale < 6
    best = history.objective.argmin()
    without_penalty = history.losses.sums[best].argmin()
    assert LOGIT_SCALES[without_penalty] == 20


# --- who chooses none -----------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"optimize_scale": False}, id="by the user's wish"),
        pytest.param({"link_approx": "bridge"}, id="bridge"),
    ],
)
def test_searches_that_choose_no_scale_score_and_leave_a_scale_of_1(
    la, validation, options
):
    # Of an earlier search, say.
    la.logit_scale = SCALE
    search = GridSearch(val_loader=validation, **options, **GRID)
    history = search(la)
    assert la.logit_scale == 1
    assert history.logit_scale is None
    assert len(history.objective) == GRID["grid_size"]
    la.prior_precision = history.prior_precision[0]
    link = options.get("link_approx", "mean_field")
    expected = mean_loss(la, validation, link_approx=link)
    found = history.objective[0].item()
    assert found == pytest.approx(expected, rel=1e-5)


# --- the edge of the grid -------------------------------------------------------------


def test_the_last_point_is_no_fault_where_a_scale_is_chosen():
    la, texts = underconfident()
    search = GridSearch(val_loader=texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = search(la)
    # Of 100 priors, and the model alone.
    assert history.objective.argmin() > 90


def test_a_search_that_ends_without_variance_says_so():
    la, texts = underconfident()
    assert "without variance" not in repr(la)
    assert "do not vary" not in la.summary()
    GridSearch(val_loader=texts)(la)
    assert "without variance" in repr(la)
    assert "without variance" in repr(la)
    assert "do not vary" in la.summary()
    prediction = la.predict(texts)
    assert not prediction.epistemic_entropy.any()
    assert not prediction.label_variance.any()
    assert prediction.total_entropy.all()


def test_the_last_point_is_said_where_no_scale_is_chosen():
    la, texts = underconfident()
    search = GridSearch(val_loader=texts, optimize_scale=False)
    with pytest.warns(UserWarning, match="the last"):
        search(la)
