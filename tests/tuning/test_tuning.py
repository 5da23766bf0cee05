"""Methods by name and as objects, and the options that each takes."""

import warnings

import pytest
import torch

from tests.support.posteriors import fitted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "newton"}, "none of"),
        ({"method": "gridsearch"}, "pass val_loader"),
        ({"method": "val_gd"}, "pass val_loader"),
        ({"method": "val_gd", "val_loader": []}, "no data"),
        ({"method": "gridsearch", "val_loader": []}, "no data"),
        ({"method": "gridsearch", "val_loader": [], "pred_type": "nn"}, "no data"),
        ({"method": "val_gd", "val_loader": "batches", "link_approx": "bridge"}, "links"),
        ({"method": "val_gd", "val_loader": "batches", "pred_type": "nn"}, "no option pred_type"),
        ({"method": "gridsearch", "val_loader": "batches", "pooling": 1.0}, "no option pooling"),
        ({"method": "val_gd", "val_loader": "unlabelled"}, "need labels"),
        ({"method": "gridsearch", "val_loader": "unlabelled"}, "need labels"),
        ({"method": "val_gd", "val_loader": "batches", "init_prior_prec": -1.0}, "above 0"),
        ({"method": "val_gd", "val_loader": "nan"}, "batch 1: .*non-finite"),
        ({"method": "gridsearch", "val_loader": "nan"}, "batch 1: .*non-finite"),
        ({"optimize_sigma_noise": True}, "for regression"),
        ({"init_prior_prec": 0.0}, "above 0"),
        ({"prior_structure": "diag"}, "scalar or per-layer"),
    ],
)
def test_bad_arguments_leave_the_prior_precision_alone(validation, arguments, message):
    la = fitted(prior_precision=0.4)
    embedding = la.model.model.get_input_embeddings()
    unlabelled = [{k: v for k, v in batch.items() if k != "labels"} for batch in validation]
    loaders = {"batches": validation, "nan": validation, "unlabelled": unlabelled}
    loader = arguments.get("val_loader")
    if loader == "nan":
        validation[0]["input_ids"].clamp_(max=58)
        validation[1]["input_ids"][:] = 59
        embedding.weight.data[59] = torch.nan
    if isinstance(loader, str):
        arguments = arguments | {"val_loader": loaders[loader]}
    with pytest.raises(ValueError, match=message):
        la.optimize_prior_precision(**arguments)
    torch.testing.assert_close(la.prior_precision, torch.tensor([0.4]).double())


def test_nothing_is_said_that_was_not_asked_for(validation, capfd):
    la = fitted()
    capfd.readouterr()
    grid = {"method": "gridsearch", "val_loader": validation, "grid_size": 2}
    descent = {"method": "val_gd", "val_loader": validation, "n_steps": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.optimize_prior_precision(**grid)
        la.optimize_prior_precision(**descent)
    assert capfd.readouterr() == ("", "")
    la.optimize_prior_precision(progress_bar=True, **grid)
    la.optimize_prior_precision(progress_bar=True, verbose=True, **descent)
    la.optimize_prior_precision(n_steps=2, tolerance=0, progress_bar=True)
    out, err = capfd.readouterr()
    assert "Optimized prior precision" in out
    for title in ("Predictive statistics", "Grid search", "validation loss", "evidence"):
        assert title in err
