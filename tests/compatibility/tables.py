"""Prints what works with which model, adapter, precision and wrapper.

That is `benchmarks/results/compatibility.md`.
"""

from collections.abc import Iterator, Mapping

import torch

from tests.compatibility.families import table
from tests.compatibility.kinds import (
    ADAPTERS,
    BOUNDS,
    PRECISIONS,
    QUANTIZERS,
    WRAPPERS,
    Kind,
)
from tests.support.matrices import CASES

Rows = dict[str, str]


def tables() -> Iterator[str]:
    """Write each table in markdown."""
    yield "\n".join(table())
    of_adapters = _outcomes(ADAPTERS)
    # Tests of these have no `Kind`, for all have the same outcome.
    of_adapters |= dict.fromkeys(CASES, "exact, one example at a time")
    yield _table("adapter", "outcome", of_adapters)
    yield _table("wrapper", "outcome", _outcomes(WRAPPERS))
    yield _table("precision", "covariances within", _covariances())


def _outcomes(kinds: Mapping[str, Kind]) -> Rows:
    return {name: kind.outcome for name, kind in kinds.items()}


def _covariances() -> Rows:
    """Say how near covariances are to those of float64, or of the same model."""
    bounds = {}
    for name, precision in PRECISIONS.items():
        bounds[name] = f"{precision.bound:g} of float64"
    single = f"{BOUNDS[torch.float32]:g} (float32)"
    half = f"{BOUNDS[torch.bfloat16]:g} (bfloat16)"
    for name in QUANTIZERS:
        bounds[name] = f"{single} and {half} of the same model's own gradients"
    return bounds


def _table(kind: str, heading: str, outcomes: Mapping[str, str]) -> str:
    lines = [f"| {kind} | {heading} |", "|---|---|"]
    for name, outcome in outcomes.items():
        lines.append(f"| {name} | {outcome} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n\n".join(tables()))
