"""Threads that share a model take turns; compiled code and other default devices stay outside."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event

import pytest
import torch

from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import STRUCTURES, fitted, make

# --- threads -------------------------------------------------------------------------------------


def test_fits_statistics_and_predictions_of_one_model_exclude_each_other():
    la, batches = fitted(), ragged_batches()
    expected = la(batches[0])
    uses = [
        lambda: la.fit(batches),
        lambda: la.predictive_statistics(batches),
        lambda: la(batches[0], pred_type="nn", link_approx="mc", n_samples=2),
        lambda: torch.testing.assert_close(la(batches[0]), expected, rtol=0, atol=0),
    ]
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(use) for use in uses * 4]:
            future.result()


USES = {
    "state": lambda la, folder: la.state_dict()["prior_precision"],
    "save": lambda la, folder: la.save_pretrained(folder),
    "samples": lambda la, folder: la.sample(1, torch.Generator()),
    "adapters": lambda la, folder: la.sample_adapters(1, folder),
}


@pytest.mark.parametrize("use", USES)
def test_nothing_of_a_prior_precision_that_is_only_tried_gets_out(use, tmp_path):
    la = fitted()
    trying, go_on = Event(), Event()

    def loss(*_: torch.Tensor) -> torch.Tensor:
        trying.set()
        assert go_on.wait(30)
        return torch.zeros(())

    def tune() -> None:
        la.optimize_prior_precision(
            method="gridsearch", val_loader=ragged_batches(), loss=loss, grid_size=2
        )

    with ThreadPoolExecutor(2) as pool:
        tuning = pool.submit(tune)
        assert trying.wait(30)
        using = pool.submit(USES[use], la, tmp_path)
        done, _ = wait([using], timeout=0.5)
        go_on.set()
        tuning.result()
        using.result()
    assert not done


# --- compiled models -----------------------------------------------------------------------------


def compiled_whole():
    return torch.compile(lora_model("bert"))


def compiled_in_place():
    model = lora_model("bert")
    model.compile()
    return model


def compiled_base():
    model = lora_model("bert")
    model.base_model.model.bert.encoder = torch.compile(model.base_model.model.bert.encoder)
    return model


@pytest.mark.parametrize("make_model", [compiled_whole, compiled_in_place, compiled_base])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_compiled_model_has_the_posterior_of_the_model_as_it_was(structure, make_model):
    batch, model = ragged_batches()[0], make_model()
    before = [dict(vars(module)) for module in model.modules()]
    expected = fitted(structure=structure).predictive_moments(batch)
    with pytest.warns(UserWarning, match="The model is compiled: fits and predictions run it eag"):
        la = fitted(model=model, structure=structure)
    torch.testing.assert_close(la.predictive_moments(batch), expected, rtol=1e-12, atol=1e-15)
    assert [dict(vars(module)) for module in model.modules()] == before


# --- default devices -----------------------------------------------------------------------------


@pytest.fixture
def elsewhere():
    """A function that makes tensors without a device useless."""
    if not hasattr(torch, "get_default_device"):
        pytest.skip("PyTorch does not tell its default device")
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)


def outcomes(la, batches):
    """Of every way to choose, and of predictions and statistics."""
    torch.manual_seed(0)
    la.fit(batches)
    found = [la.log_marginal_likelihood()]
    for method, data in (("marglik", {}), ("agreement", {"train_loader": batches})):
        la.optimize_prior_precision(method=method, **data)
        found.append(la.prior_precision)
    for method in ("gridsearch", "val_gd"):
        la.optimize_prior_precision(method=method, val_loader=batches)
        found.append(la.prior_precision)
    moments = la.predictive_statistics(batches).moments(la.prior_precision)
    links = [la(batches[0], link_approx=link) for link in ("probit", "mean_field")]
    return [*found, *moments, *links, la.functional_samples(batches[0], n_samples=1).isfinite()]


def test_a_posterior_is_the_same_under_another_default(elsewhere):
    model, batches = lora_model("bert").eval(), ragged_batches()
    expected = outcomes(make(model), batches)
    elsewhere()
    found = outcomes(make(model), batches)
    assert torch.ones(1).is_meta
    torch.set_default_device(None)
    torch.testing.assert_close(found, expected)
