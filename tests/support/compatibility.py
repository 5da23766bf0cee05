"""Prints what works with which model, adapter, precision and wrapper.

That is `benchmarks/results/compatibility.md`.
"""

from collections.abc import Iterator, Mapping

import torch

from tests.support.families import table
from tests.support.kinds import ADAPTERS, PRECISIONS, WRAPPERS
from tests.support.quantizers import BOUNDS, QUANTIZERS


def tables() -> Iterator[str]:
    """Each table in markdown."""
    yield "\n".join(table())
    yield _table("adapter", {name: kind.outcome for name, kind in ADAPTERS.items()})
    yield _table("wrapper", {name: kind.outcome for name, kind in WRAPPERS.items()})
    yield _table("precision", _covariances())


def _covariances() -> dict[str, str]:
    of_float64 = {name: f"{precision.bound:g} of float64" for name, precision in PRECISIONS.items()}
    single = BOUNDS[torch.float32]
    half = BOUNDS[torch.bfloat16]
    of_own = f"{single:g} (float32) and {half:g} (bfloat16) of the same model's own gradients"
    return of_float64 | dict.fromkeys(QUANTIZERS, of_own)


def _table(kind: str, outcomes: Mapping[str, str]) -> str:
    outcome = "covariances within" if kind == "precision" else "outcome"
    rows = [f"| {name} | {found} |" for name, found in outcomes.items()]
    return "\n".join([f"| {kind} | {outcome} |", "|---|---|", *rows])


if __name__ == "__main__":
    print("\n\n".join(tables()))
