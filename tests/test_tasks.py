"""What a posterior of every task has: files, copies, mixtures, searches, variances."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import laplace_lora_ext
from tests.support.models import record_calls, without_labels
from tests.support.tasks import TASKS, two

pytestmark = pytest.mark.filterwarnings("ignore:The best prior precision of the grid")

OF_NUMBERS = ["numbers", "rewards"]
OF_CLASSES = [name for name in TASKS if name not in OF_NUMBERS]
tasks = pytest.mark.parametrize("name", TASKS)


def columns(outputs: Any) -> list[Tensor]:
    """Take moments or probabilities as a list."""
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def inputs_of(name: str) -> dict[str, Tensor]:
    """Make the first batch without its labels."""
    first, *_ = TASKS[name].data()
    return without_labels(first)


@tasks
def test_files_and_copies_keep_it(name, tmp_path):
    la = TASKS[name].fitted(prior_precision=3.0)
    la.save_pretrained(tmp_path)
    loaded = laplace_lora_ext.from_pretrained(la.model.model, tmp_path)
    inputs = inputs_of(name)
    expected = columns(la(inputs))
    evidence = la.log_marginal_likelihood()
    for again in (loaded, copy.deepcopy(la)):
        assert again.likelihood == la.likelihood
        assert_close(columns(again(inputs)), expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(again.log_marginal_likelihood(), evidence)
    # More data are added to what the file says of the first.
    loaded.fit(TASKS[name].data(), override=False)
    assert loaded.n_data == 2 * la.n_data


@pytest.mark.parametrize("name", OF_CLASSES)
def test_a_mixture_has_the_mean_of_its_members_probabilities(name):
    both = two(name)
    inputs = without_labels(both.batch)
    mean = (both.first(inputs) + both.second(inputs)) / 2
    assert_close(both.mixture()(inputs), mean, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in TASKS if name != "diagonal"])
def test_statistics_have_the_moments_of_the_posterior(name):
    la = TASKS[name].fitted()
    batches = TASKS[name].data()
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    la.prior_precision = 0.3
    found = statistics.moments(la.prior_precision)
    moments = [la.predictive_moments(batch) for batch in batches]
    assert_close(found.f_mu, torch.cat([each.f_mu for each in moments]))
    assert_close(found.f_var, torch.cat([each.f_var for each in moments]))


METHODS = {
    "marglik": (None, {"n_steps": 2}),
    "agreement": ("train_loader", {}),
    "gridsearch": ("val_loader", {"grid_size": 3}),
    "val_gd": ("val_loader", {"n_steps": 2}),
}


@tasks
def test_every_method_chooses_its_prior(name):
    la = TASKS[name].fitted()
    for method, (loader, options) in METHODS.items():
        # Statistics of classes, which the host's structures and numbers don't have.
        takes_all = method in ("marglik", "gridsearch")
        if takes_all or (name != "diagonal" and not la.task.has_noise):
            data = {loader: TASKS[name].data()} if loader else {}
            history = la.optimize_prior_precision(method=method, **options, **data)
            assert history.objective.isfinite().all(), method
            assert la.prior_precision.isfinite().all(), method


@pytest.mark.parametrize("name", OF_CLASSES)
def test_learnt_variances_predict_by_one_pass(name):
    la = TASKS[name].fitted(prior_precision=0.3)
    la.amortize(TASKS[name].data(), unlabelled=None)
    inputs = inputs_of(name)
    expected = la(inputs, link_approx="mean_field")
    calls = record_calls(la.model.model)
    found = la(inputs, pred_type="amortized", link_approx="mean_field")
    assert len(calls) == 1
    assert_close(found, expected, rtol=0, atol=0.2, equal_nan=True)
