"""A scale of the logits beside the prior: what predicts by it, and how it is chosen."""

import math
import warnings

import pytest
import torch
from torch.nn.functional import nll_loss, pad
from torch.testing import assert_close

from laplace_lora_ext import GridSearch, LaplaceMixture, Moments, ValGD, from_pretrained
from laplace_lora_ext.saving import read_state, write_state
from laplace_lora_ext.tuning.scales import LOGIT_SCALES, PENALTY
from tests.support.models import lora_model, ragged_batches
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


def without_labels(batch):
    return {key: value for key, value in batch.items() if key != "labels"}


# --- predictions ----------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("link", LINKS)
def test_a_link_gets_scaled_logits(link, structure):
    la = fitted(structure=structure)
    batch = without_labels(ragged_batches()[0])
    f_mu, f_var = la.predictive_moments(batch)
    scaled = Moments(SCALE * f_mu, SCALE**2 * f_var)
    options = {"link_approx": link, "n_samples": 50}
    torch.manual_seed(0)
    expected = la(scaled, **options)
    la.logit_scale = SCALE
    for x in (batch, Moments(f_mu, f_var)):
        torch.manual_seed(0)
        assert_close(la(x, **options), expected, rtol=1e-12, atol=1e-14)
    # Of the model's own logits.
    assert torch.equal(la.predictive_moments(batch).f_var, f_var)


def test_without_variance_it_is_the_inverse_of_a_temperature():
    la = fitted(prior_precision=1e15)
    batch = ragged_batches()[0]
    logits = la.predictive_moments(batch).f_mu
    la.logit_scale = SCALE
    expected = (SCALE * logits).softmax(-1)
    for link in ("probit", "mean_field", "mc"):
        assert_close(la(batch, link_approx=link), expected)
    assert_close(la.predict(batch).probabilities, expected)
    assert_close(la(batch, pred_type="nn", generator=generator()), expected)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_draws_are_of_scaled_logits(pred_type):
    la = fitted()
    batch = without_labels(ragged_batches()[0])

    def drawn():
        options = {"pred_type": pred_type, "n_samples": 4}
        of_logits = la.functional_samples(batch, generator=generator(), **options)
        return of_logits, la.predictive_samples(batch, generator=generator(), **options)

    logits, _ = drawn()
    la.logit_scale = SCALE
    scaled, probabilities = drawn()
    assert_close(scaled, SCALE * logits)
    assert_close(probabilities, scaled.softmax(-1))


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_a_function_is_of_scaled_logits(pred_type):
    la = fitted()
    batch = without_labels(ragged_batches()[0])
    expected = SCALE * la.function(seed=1, pred_type=pred_type)(batch)
    la.logit_scale = SCALE
    assert_close(la.function(seed=1, pred_type=pred_type)(batch), expected)


def test_decisions_draw_scaled_logits():
    la = fitted()
    batch = ragged_batches()[0]
    f_mu, f_var = la.predictive_moments(batch)
    expected = la.predict(
        Moments(SCALE * f_mu, SCALE**2 * f_var), generator=generator()
    )
    la.logit_scale = SCALE
    found = la.predict(batch, generator=generator())
    assert_close(tuple(found), tuple(expected))


def test_learnt_variances_are_scaled_with_the_logits():
    la = fitted()
    batches = ragged_batches()
    la.amortize(batches)
    f_mu, f_var = fitted().predictive_moments(batches[0])
    mine = la(batches[0], pred_type="amortized", link_approx="mean_field")
    la.logit_scale = SCALE
    scaled = la(batches[0], pred_type="amortized", link_approx="mean_field")
    assert not torch.allclose(mine, scaled)
    la.amortize(batches)  # the same, whatever the scale
    again = la(batches[0], pred_type="amortized", link_approx="mean_field")
    assert_close(again, scaled)
    close = {"rtol": 0.2, "atol": 0.02}
    la.logit_scale = 1.0
    expected = la(Moments(SCALE * f_mu, SCALE**2 * f_var), link_approx="mean_field")
    assert_close(scaled, expected, **close)


def test_the_evidence_and_the_curvature_ignore_it():
    la = fitted()
    before = la.log_marginal_likelihood()
    sums = la.state_dict()["H"]
    la.logit_scale = SCALE
    assert torch.equal(la.log_marginal_likelihood(), before)
    la.fit(ragged_batches())
    assert torch.equal(la.log_marginal_likelihood(), before)
    assert_close(la.state_dict()["H"], sums)
    assert la.logit_scale == SCALE


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, torch.ones(2)])
def test_what_is_no_scale_is_refused(value):
    la = fitted()
    with pytest.raises(ValueError, match="logit_scale must be"):
        la.logit_scale = value
    assert la.logit_scale == 1


def test_where_there_are_no_logits_it_names_what_to_use():
    la, _ = plain_regression()
    with pytest.raises(
        ValueError, match="regression has no logit_scale: use sigma_noise"
    ):
        la.logit_scale = 2
    text = fitted_text()
    with pytest.raises(
        ValueError, match="language_modeling has no logit_scale: use the temp"
    ):
        text.logit_scale = 2
    la.logit_scale = text.logit_scale = 1


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_is_saved_and_shown(structure, tmp_path):
    la = fitted(structure=structure)
    assert "logit scale" not in repr(la)
    la.logit_scale = SCALE
    assert "logit scale 2.5" in repr(la)
    la.save_pretrained(tmp_path)
    read = from_pretrained(la.model.model, tmp_path)
    batch = ragged_batches()[0]
    assert read.logit_scale == SCALE
    assert torch.equal(read(batch), la(batch))
    state = read_state(tmp_path)
    del state["logit_scale"]  # as earlier releases wrote it
    write_state(state, tmp_path)
    assert from_pretrained(la.model.model, tmp_path).logit_scale == 1


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


def two():
    first = fitted(prior_precision=2.0)
    second = fitted(model=another_training(), prior_precision=0.5)
    second.logit_scale = 3.0
    return first, second


def test_a_mixture_multiplies_the_scales_of_its_members():
    first, second = two()
    mixture = LaplaceMixture([first, second])
    assert mixture.logit_scale == 1
    mixture.logit_scale = 2.0
    assert [member.logit_scale for member in mixture.members] == [2, 6]
    assert [first.logit_scale, second.logit_scale] == [1, 3]
    first.logit_scale, second.logit_scale = 2.0, 6.0
    batch = ragged_batches()[0]
    expected = (first(batch) + second(batch)) / 2
    assert_close(mixture(batch), expected)


def test_a_mixture_chooses_by_the_mean_of_its_members():
    mixture = LaplaceMixture(two())
    batches = ragged_batches(seed=7)
    history = mixture.optimize_prior_precision(val_loader=batches, **GRID)
    best = history.objective.argmin()
    loss = nll(mixture, batches) + penalty_of(mixture.logit_scale, batches)
    assert history.objective[best].item() == pytest.approx(loss, rel=1e-4)
    assert mixture.logit_scale == history.logit_scale[best].item()
    given = mixture.predictive_statistics(batches)
    again = mixture.optimize_prior_precision(val_loader=given, **GRID)
    assert_close(again.objective, history.objective, rtol=1e-6, atol=0)


# --- the choice -----------------------------------------------------------------------


def penalty_of(scale: float, batches) -> float:
    """What a scale adds to the mean loss of some texts."""
    return PENALTY * math.log(scale) ** 2 / size(batches)


def size(batches) -> int:
    return sum(len(batch["labels"]) for batch in batches)


def nll(la, batches, **options) -> float:
    """Average over examples, by predictions from the inputs."""
    options = {"link_approx": "mean_field"} | options
    losses = []
    for batch in batches:
        log_p = la(batch, **options).double().log()
        losses.append(nll_loss(log_p, batch["labels"], reduction="none"))
    return torch.cat(losses).mean().item()


def underconfident(**keywords):
    """Fit a posterior, and make texts of which its model is right, yet not sure."""
    la = fitted(**keywords)
    texts = ragged_batches(lengths=(7, 4, 5, 7, 3, 6, 2, 7) * 3, seed=7)
    for batch in texts:
        batch["labels"] = la.predictive_moments(batch).f_mu.argmax(-1)
    return la, texts


TASKS = {"too sure": overconfident, "not sure enough": underconfident}


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
@pytest.mark.parametrize("task", TASKS)
def test_it_is_never_worse_than_the_prior_or_the_temperature_alone(task, structure):
    la, texts = TASKS[task](structure=structure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = GridSearch(val_loader=texts, optimize_scale=False, **GRID)(la)
    assert la.logit_scale == 1
    logits = torch.cat([la.predictive_moments(batch).f_mu for batch in texts])
    labels = torch.cat([batch["labels"] for batch in texts])
    of_temperatures = []
    for scale in torch.logspace(math.log10(0.2), math.log10(20), 400).tolist():
        log_p = (scale * logits).log_softmax(-1)
        loss = nll_loss(log_p, labels).item()
        of_temperatures.append(loss + penalty_of(scale, texts))
    passes = count_forward_passes(la)
    history = GridSearch(val_loader=texts, **GRID)(la)
    if structure == "lowrank_kron":
        assert len(passes) == len(texts)
    best = history.objective.min().item()
    rivals = [alone.objective.min().item(), min(of_temperatures)]
    assert best <= min(rivals) + 1e-4
    if task == "not sure enough":
        assert best < alone.objective.min() - 0.05
        assert la.logit_scale > 1.5
    found = nll(la, texts) + penalty_of(la.logit_scale, texts)
    assert found == pytest.approx(best, rel=1e-4)
    # Without variance, the last point is the best temperature.
    assert history.objective[-1].item() == pytest.approx(min(of_temperatures), rel=1e-4)


@pytest.mark.parametrize("link", ["mean_field", "probit", "mc"])
def test_the_loss_is_that_of_every_pair(link):
    la = fitted()
    texts = ragged_batches(seed=7)
    options = {"link_approx": link, "n_samples": 30}
    torch.manual_seed(0)
    history = GridSearch(val_loader=texts, **options, **GRID)(la)
    torch.manual_seed(0)
    seed = torch.randint(2**31, ()).item()
    for point in range(8):
        la.prior_precision = history.prior_precision[point]
        for index in (0, 4, 6):
            la.logit_scale = float(LOGIT_SCALES[index])
            # The same draws for all texts, priors and scales.
            data = [joined(texts)] if link == "mc" else texts
            loss = nll(la, data, generator=generator(seed), **options)
            found = history.losses.sums[point, index].item() / size(texts)
            assert found == pytest.approx(loss, rel=1e-5)
            penalised = loss + penalty_of(la.logit_scale, texts)
            assert history.objective[point].item() <= penalised * (1 + 1e-6)


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
    GridSearch(val_loader=texts, link_approx=link, **GRID)(la)
    chosen = la.logit_scale
    losses = []
    for factor in (0.98, 1.0, 1.02):
        la.logit_scale = factor * chosen
        penalty = penalty_of(la.logit_scale, texts)
        losses.append(nll(la, texts, link_approx=link) + penalty)
    assert losses[1] < min(losses[0], losses[2])


def test_a_few_texts_that_are_all_right_do_not_ask_for_the_largest_scale():
    la, texts = underconfident()
    assert size(texts) < 30
    history = GridSearch(val_loader=texts)(la)
    best = history.objective.argmin()
    assert 1 < la.logit_scale < 6
    without_penalty = history.losses.sums[best].argmin()
    assert LOGIT_SCALES[without_penalty] == 20


@pytest.mark.parametrize(
    "options",
    [
        {"optimize_scale": False},
        {"loss": lambda probabilities, y: nll_loss(probabilities.log(), y)},
        {"pred_type": "nn", "n_samples": 2},
        {"link_approx": "bridge"},
    ],
)
def test_other_searches_score_the_present_scale(options):
    la = fitted()
    la.logit_scale = SCALE
    texts = ragged_batches(seed=7)
    torch.manual_seed(0)
    history = GridSearch(val_loader=texts, **options, **GRID)(la)
    assert la.logit_scale == SCALE
    assert history.logit_scale is None
    assert len(history.objective) == 7
    if "n_samples" not in options:
        la.prior_precision = history.prior_precision[0]
        link = options.get("link_approx", "mean_field")
        expected = nll(la, texts, link_approx=link)
        assert history.objective[0].item() == pytest.approx(expected, rel=1e-5)


def test_a_descent_scores_the_present_scale():
    la = fitted()
    la.logit_scale = SCALE
    texts = ragged_batches(seed=7)
    expected = nll(la, texts)
    history = ValGD(val_loader=texts, n_steps=1)(la)
    assert history.objective[0].item() == pytest.approx(expected, rel=1e-5)
    assert la.logit_scale == SCALE


def test_a_search_that_fails_leaves_the_scale_as_it_was(monkeypatch):
    la = fitted()
    la.logit_scale = SCALE
    monkeypatch.setattr(
        "laplace_lora_ext.tuning.scales.GridLosses.choose", lambda *_: 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        GridSearch(val_loader=ragged_batches(seed=7), **GRID)(la)
    assert la.logit_scale == SCALE
    assert la.prior_precision.tolist() == [1]


def test_the_last_point_is_no_fault_where_a_scale_is_chosen():
    la, texts = underconfident()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = GridSearch(val_loader=texts)(la)
    assert history.objective.argmin() > 90
    with pytest.warns(UserWarning, match="the last"):
        GridSearch(val_loader=texts, optimize_scale=False)(la)
