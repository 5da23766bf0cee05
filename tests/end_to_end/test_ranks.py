"""Everything after a fit, by many processes as by one."""

from typing import Any

import pytest
import torch

from tests.support.dense import full_rank
from tests.support.models import Batch, one_by_one
from tests.support.posteriors import GRID, generator, make
from tests.support.ranks import assert_alike, dealt, on_ranks
from tests.support.tasks import TASKS


def examples_of(name: str) -> list[Batch]:
    """Take nine examples of a task."""
    # Two ranks can't share nine alike: one of them passes over an example that must not
    # count, in a batch by itself.
    return (one_by_one(TASKS[name].data()) * 2)[:9]


METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "agreement": ("train_loader", {"max_change": 0.05}),
    "agreement of some": ("train_loader", {"max_change": 0.05, "max_examples": 5}),
    "gridsearch": ("val_loader", GRID | {"grid_size": 3}),
    "val_gd": ("val_loader", {"n_steps": 10}),
    "marglik": ("", {"n_steps": 10}),
}


def outcomes(name: str, structure: str) -> dict[str, Any]:
    """Fit a task, choose the prior by each method, and predict."""
    loader = dealt(examples_of(name))
    settings = full_rank(structure) | dict(TASKS[name].keywords)
    la = make(TASKS[name].model(), structure, **settings)
    la.fit(loader)
    found = {"n_data": la.n_data, "loss": la.loss}
    found["evidence"] = la.log_marginal_likelihood().detach()
    for key, (data, options) in METHODS.items():
        method, *_ = key.split()
        # These need statistics of classes.
        of_classes = structure == "lowrank_kron" and name != "numbers"
        if method in ("val_gd", "agreement") and not of_classes:
            continue
        given = options | ({data: loader} if data else {})
        if method == "val_gd":
            given["generator"] = generator()
        history = la.optimize_prior_precision(method=method, **given)
        found[key] = history.objective[-1:], la.prior_precision
    if structure == "lowrank_kron":
        statistics = la.predictive_statistics(loader, dtype=torch.float64)
        moments = statistics.moments(0.1)
        # In the order of the data.
        found["statistics"] = moments.f_mu, moments.f_var, statistics.targets
    if name != "rewards":
        found["learnt"] = la.amortize(loader, unlabelled=None).offset
        found["prediction"] = tuple(
            la.predict(dealt(examples_of(name)), generator=generator())
        )
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "structure"),
    [
        ("classes", "lowrank_kron"),
        ("numbers", "full"),
        ("several labels", "diag"),
        ("answers", "kron"),
        ("tokens", "lowrank_kron"),
        ("rewards", "lowrank_kron"),
    ],
)
def test_everything_is_as_by_one_process(name, structure):
    def job(_=0):
        return outcomes(name, structure)

    found = on_ranks(job, 2)
    # Statistics are in float32, and sums are in another order.
    assert_alike(found, job(), rtol=1e-4, atol=1e-6, equal_nan=True)
