"""Everything after a fit, by many processes as by one."""

import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader

from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import GRID, STRUCTURES, generator, make
from tests.support.ranks import Texts, accelerated, failures, on_ranks, strided_loader

CLOSE = {"rtol": 1e-7, "atol": 1e-10}
WAYS = {
    "agreement": {"max_change": 0.05},
    "agreement of some": {"max_change": 0.05, "max_examples": 5},
    "gridsearch": GRID,
    "val_gd": {"n_steps": 30, "generator": "seeded"},
    "marglik": {},
}


def fitted(structure: str = "lowrank_kron"):
    settings = {"backend_kwargs": {"rank": 100}} if structure == "lowrank_kron" else {}
    la = make(lora_model("bert"), structure, **settings)
    la.fit(strided_loader())
    return la


def assert_same(results, expected, **close):
    for result in results:
        assert not isinstance(result, Exception), result
        torch.testing.assert_close(result, expected, **(close or CLOSE))
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


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
    assert_same(on_ranks(lambda _: chosen(*arguments), 3), chosen(*arguments))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("method", ["agreement", "gridsearch"])
def test_every_structure_chooses_as_one_process_does(structure, method):
    arguments = method, structure, WAYS[method]
    close = {"rtol": 1e-4, "atol": 1e-6}  # statistics and the host's metric are in float32
    assert_same(on_ranks(lambda _: chosen(*arguments), 2), chosen(*arguments), **close)


def test_without_a_generator_ranks_choose_alike_too():
    def job(rank):
        torch.manual_seed(rank)
        la = fitted()
        options = {"n_steps": 10, "val_loader": strided_loader()}
        history = la.optimize_prior_precision(method="val_gd", **options)
        return la.prior_precision, history.prior_precision, history.objective

    results = on_ranks(job, 2)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def gathered_facts(_=0, loader=None):
    la = fitted()
    loader = loader or strided_loader()
    statistics = la.predictive_statistics(loader, dtype=torch.float64)
    return *statistics.moments(0.1), statistics.targets


def test_statistics_are_in_the_order_of_the_data():
    expected = gathered_facts()
    assert torch.equal(expected[2], torch.stack([text["labels"] for text in Texts()]))
    for world in (2, 3):
        assert_same(on_ranks(gathered_facts, world), expected)


@pytest.mark.parametrize("options", [{}, {"even_batches": False}, {"dispatch_batches": True}])
def test_accelerate_prepares_the_loader(options):
    def job(rank):
        prepared = accelerated(rank, 2, DataLoader(Texts(), batch_size=2), **options)
        la = make(lora_model("bert"), backend_kwargs={"rank": 100})
        la.fit(prepared)
        statistics = la.predictive_statistics(prepared, dtype=torch.float64)
        return la.log_marginal_likelihood().detach(), *statistics.moments(0.1), statistics.targets

    la = fitted()
    statistics = la.predictive_statistics(strided_loader(), dtype=torch.float64)
    evidence = la.log_marginal_likelihood().detach()
    assert_same(on_ranks(job, 2), (evidence, *statistics.moments(0.1), statistics.targets))


def test_predictions_and_variances_are_each_ranks_own():
    def job(rank):
        la = fitted()
        la(ragged_batches()[0])
        if rank == 0:
            la(ragged_batches()[1], pred_type="nn", link_approx="mc", n_samples=2)
            la.variance_by_layer(ragged_batches()[1])
            la.sample(3)
        return len(la.predictive_statistics(strided_loader()))

    assert on_ranks(job, 2) == [11, 11]


def test_labels_on_some_ranks_alone_are_refused():
    def job(rank):
        la = fitted()
        batch = ragged_batches()[rank]
        if rank:
            del batch["labels"]
        la.predictive_statistics([batch])

    for message in failures(on_ranks(job, 2)):
        assert message == "Some batches have labels and others have none."


def test_a_loss_that_ranks_cannot_join_is_refused():
    def job(_):
        la = fitted("diag")
        options = {"val_loader": strided_loader(), **GRID}
        la.optimize_prior_precision(method="gridsearch", loss=lambda p, y: p.sum(), **options)
        metric = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        la.optimize_prior_precision(method="gridsearch", loss=metric, **options)
        return None

    assert on_ranks(job, 2) == [None, None]


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
