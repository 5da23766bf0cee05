"""Everything after a fit, by many processes as by one."""

import pytest
import torch
import torchmetrics
from torch.testing import assert_close
from torch.utils.data import DataLoader

from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import GRID, STRUCTURES, generator, make
from tests.support.ranks import Texts, accelerated, assert_alike, failures, on_ranks, strided_loader

CLOSE = {"rtol": 1e-7, "atol": 1e-10}
WAYS = {
    "agreement": {"max_change": 0.05},
    "agreement of some": {"max_change": 0.05, "max_examples": 5},
    "gridsearch": GRID | {"grid_size": 3},
    "val_gd": {"n_steps": 30, "generator": "seeded"},
    "marglik": {},
}


def fitted(structure: str = "lowrank_kron"):
    settings = {"backend_kwargs": {"rank": 100}} if structure == "lowrank_kron" else {}
    la = make(lora_model("bert"), structure, **settings)
    la.fit(strided_loader())
    return la


def chosen(method: str, structure: str, options: dict, as_statistics: bool = False):
    method = method.removesuffix(" of some")
    la = fitted(structure)
    loader = strided_loader(9)
    if as_statistics:
        loader = la.predictive_statistics(loader, dtype=torch.float64)
    options = dict(options)
    if "generator" in options:
        options["generator"] = generator()
    if method != "marglik":
        data = "val_loader" if method in ("gridsearch", "val_gd") else "train_loader"
        options[data] = loader
    history = la.optimize_prior_precision(method=method, **options)
    return la.prior_precision, history.objective[-1:], la(ragged_batches()[0])


@pytest.mark.parametrize("method", WAYS)
def test_every_way_chooses_as_one_process_does(method):
    as_statistics = method in ("agreement", "gridsearch", "val_gd")
    arguments = method, "lowrank_kron", WAYS[method], as_statistics
    assert_alike(on_ranks(lambda _: chosen(*arguments), 3), chosen(*arguments), **CLOSE)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("method", ["agreement", "gridsearch"])
def test_every_structure_chooses_as_one_process_does(structure, method):
    arguments = method, structure, WAYS[method]
    close = {"rtol": 1e-4, "atol": 1e-6}  # statistics and the host's metric are in float32
    assert_alike(on_ranks(lambda _: chosen(*arguments), 2), chosen(*arguments), **close)


def test_without_a_generator_ranks_choose_alike_too():
    def job(rank):
        torch.manual_seed(rank)
        la = fitted()
        options = {"n_steps": 10, "val_loader": strided_loader()}
        history = la.optimize_prior_precision(method="val_gd", **options)
        return la.prior_precision, history.prior_precision, history.objective

    results = on_ranks(job, 2)
    assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("options", [None, {}, {"even_batches": False}])
def test_fits_and_statistics_are_those_of_one_process_in_the_order_of_the_data(options):
    def facts(loader):
        la = make(lora_model("bert"), backend_kwargs={"rank": 100})
        la.fit(loader)
        statistics = la.predictive_statistics(loader, dtype=torch.float64)
        learnt = la.amortize(loader, None).offset, la(ragged_batches()[0], pred_type="amortized")
        evidence = la.log_marginal_likelihood().detach()
        return *learnt, evidence, *statistics.moments(0.1), statistics.targets

    def job(rank):
        if options is None:
            return facts(strided_loader())
        return facts(accelerated(rank, 2, DataLoader(Texts(), batch_size=2), **options))

    expected = facts(strided_loader())
    assert torch.equal(expected[-1], torch.stack([text["labels"] for text in Texts()]))
    assert_alike(on_ranks(job, 2), expected, rtol=1e-5, atol=1e-7)  # learnt in float32


def test_losses_of_a_users_own_choose_alike_on_all_ranks():
    def job(_):
        la = fitted("diag")
        options = {"method": "gridsearch", "val_loader": strided_loader(), **WAYS["gridsearch"]}
        metric = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        losses = metric, lambda p, y: p.square().sum()
        return [la.optimize_prior_precision(loss=loss, **options).objective for loss in losses]

    assert_alike(on_ranks(job, 2), job(0), **CLOSE)


def test_predictions_and_variances_are_each_ranks_own():
    def job(rank):
        la = fitted()
        la(ragged_batches()[0])
        if rank == 0:
            la(ragged_batches()[1], pred_type="nn", link_approx="mc", n_samples=2)
            la.sample(3)
        return len(la.predictive_statistics(strided_loader()))

    assert on_ranks(job, 2) == [11, 11]


def test_ranks_with_the_same_validation_data_are_refused_by_a_search():
    def job(rank):
        fitted().optimize_prior_precision(
            method="gridsearch", val_loader=ragged_batches(), **WAYS["gridsearch"]
        )

    messages = failures(on_ranks(job, 2))
    assert len(messages) == 2
    assert all("Ranks 0 and 1 have the same" in message for message in messages)


def test_an_error_in_a_search_leaves_all_prior_precisions_as_they_were():
    def job(rank):
        la = fitted()
        before = la.prior_precision.clone()
        loader = strided_loader() if rank else iter(lambda: 1 / 0, None)
        try:
            la.optimize_prior_precision(method="agreement", train_loader=loader)
        finally:
            assert torch.equal(la.prior_precision, before)

    assert failures(on_ranks(job, 2)) == [
        "division by zero",
        "Rank 0 failed. ZeroDivisionError: division by zero",
    ]
