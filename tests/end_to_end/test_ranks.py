"""Everything after a fit, by many processes as by one."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader

from tests.support.dense import full_rank
from tests.support.models import first_batch, lora_model, ragged_batches
from tests.support.posteriors import GRID, generator, make
from tests.support.ranks import (
    Texts,
    accelerated,
    assert_alike,
    failures,
    on_ranks,
    strided_loader,
)

# Sums over ranks are in another order.
CLOSE = {"rtol": 1e-7, "atol": 1e-10}
IN_FLOAT32 = {"rtol": 1e-4, "atol": 1e-6}
THREE_VALUES = GRID | {"grid_size": 3}


def fitted(structure: str = "lowrank_kron"):
    """Fit a posterior to the texts of this rank, or to all of one process."""
    la = make(lora_model("bert"), structure, **full_rank(structure))
    la.fit(strided_loader())
    return la


# --- choices of the prior precision ---------------------------------------------------


# Each with its data, and whether these may be statistics.
METHODS = {
    "agreement": ("train_loader", {"max_change": 0.05}, True),
    "agreement of some": (
        "train_loader",
        {"max_change": 0.05, "max_examples": 5},
        False,
    ),
    "gridsearch": ("val_loader", THREE_VALUES, True),
    "val_gd": ("val_loader", {"n_steps": 30}, True),
    "marglik": (None, {}, False),
}


def outcomes(la, name: str, data) -> dict[str, Tensor]:
    """Choose the prior precision; find it, the objective there, and a prediction."""
    loader, options, _ = METHODS[name]
    if name == "val_gd":
        options = options | {"generator": generator()}
    method, *_ = name.split()
    given = {loader: data} if loader else {}
    history = la.optimize_prior_precision(method=method, **given, **options)
    return {
        "prior precision": la.prior_precision,
        "objective": history.objective[-1:],
        "prediction": la(first_batch()),
    }


@pytest.mark.parametrize("name", METHODS)
def test_every_way_chooses_as_one_process_does(name):
    def job(_=0):
        la = fitted()
        data = strided_loader(9)
        *_, takes_statistics = METHODS[name]
        if takes_statistics:
            # In float64, so that a difference is not rounding.
            data = la.predictive_statistics(data, dtype=torch.float64)
        return outcomes(la, name, data)

    assert_alike(on_ranks(job, 3), job(), **CLOSE)


@pytest.mark.parametrize(
    ("structure", "name"), [("lowrank_kron", "agreement"), ("kron", "gridsearch")]
)
def test_every_structure_chooses_as_one_process_does(structure, name):
    def job(_=0):
        return outcomes(fitted(structure), name, strided_loader(9))

    # Statistics and the host's metric are in float32.
    assert_alike(on_ranks(job, 2), job(), **IN_FLOAT32)


def test_without_a_generator_ranks_choose_alike_too():
    def job(rank):
        torch.manual_seed(rank)
        la = fitted()
        history = la.optimize_prior_precision(
            method="val_gd", val_loader=strided_loader(), n_steps=10
        )
        return la.prior_precision, history.prior_precision, history.objective

    results = on_ranks(job, 2)
    # Though each had a random state of its own.
    assert_close(results[0], results[1], rtol=0, atol=0)


# --- fits and predictions -------------------------------------------------------------


def by_accelerate(rank, **options):
    loader = DataLoader(Texts(), batch_size=2)
    return accelerated(rank, 2, loader, **options)


@pytest.mark.parametrize(
    "make_loader",
    [
        lambda rank: strided_loader(),
        by_accelerate,
        partial(by_accelerate, even_batches=False),
    ],
)
def test_fits_and_statistics_are_those_of_one_process_in_the_order_of_the_data(
    make_loader,
):
    def facts(loader):
        la = make(lora_model("bert"), **full_rank())
        la.fit(loader)
        statistics = la.predictive_statistics(loader, dtype=torch.float64)
        moments = statistics.moments(0.1)
        amortized = la.amortize(loader, None)
        return {
            "evidence": la.log_marginal_likelihood().detach(),
            "means": moments.f_mu,
            "covariances": moments.f_var,
            "targets": statistics.targets,
            "offset": amortized.offset,
            "amortized prediction": la(first_batch(), pred_type="amortized"),
        }

    expected = facts(strided_loader())
    labels = torch.stack([text["labels"] for text in Texts()])
    assert torch.equal(expected["targets"], labels)
    found = on_ranks(lambda rank: facts(make_loader(rank)), 2)
    # Variances are learnt in float32.
    assert_alike(found, expected, rtol=1e-5, atol=1e-7)


def test_predictions_and_variances_are_each_ranks_own():
    def job(rank):
        la = fitted()
        first, second, _ = ragged_batches()
        la(first)
        # No rank waits for what another one does by itself.
        if rank == 0:
            la(second, pred_type="nn", link_approx="mc", n_samples=2)
            la.sample(3)
        return len(la.predictive_statistics(strided_loader()))

    assert on_ranks(job, 2) == [11, 11]


def test_ranks_with_the_same_validation_data_are_refused_by_a_search():
    def job(rank):
        fitted().optimize_prior_precision(
            method="gridsearch", val_loader=ragged_batches(), **THREE_VALUES
        )

    messages = failures(on_ranks(job, 2))
    assert len(messages) == 2
    for message in messages:
        assert "Ranks 0 and 1 have the same" in message


def a_loader_that_fails() -> Iterator:
    yield from []
    raise ZeroDivisionError("division by zero")


def test_an_error_in_a_search_leaves_all_prior_precisions_as_they_were():
    def job(rank):
        la = fitted()
        before = la.prior_precision.clone()
        # On one rank only: the other must not wait for it.
        loader = strided_loader() if rank == 1 else a_loader_that_fails()
        try:
            la.optimize_prior_precision(method="agreement", train_loader=loader)
        finally:
            assert torch.equal(la.prior_precision, before)

    assert failures(on_ranks(job, 2)) == [
        "division by zero",
        "Rank 0 failed. ZeroDivisionError: division by zero",
    ]
