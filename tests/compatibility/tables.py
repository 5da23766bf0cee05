"""Prints what works with which model, adapter, precision and wrapper.

That is `benchmarks/results/compatibility.md`.
"""

from collections.abc import Iterator, Mapping

import torch

from tests.compatibility.families import table
from tests.compatibility.kinds import ADAPTERS, PRECISIONS, WRAPPERS
from tests.compatibility.quantizers import BOUNDS, QUANTIZERS
from tests.support.matrices import CASES


def tables() -> Iterator[str]:
    """Write each table in markdown."""
    yield "\n".join(table())
    of_adapters = {name: kind.outcome for name, kind in ADAPTERS.items()}
    of_adapters |= dict.fromkeys(CASES, "exact, one example at a time")
    of_wrappers = {name: kind.outcome for name, kind in WRAPPERS.items()}
    yield _table("adapter", "outcome", of_adapters)
    yield _table("wrapper", "outcome", of_wrappers)
    yield _table("precision", "covariances within", _covariances())


def _covariances() -> dict[str, str]:
    bounds = {
        name: f"{precision.bound:g} of float64"
        for name, precision in PRECISIONS.items()
    }
    single = f"{BOUNDS[torch.float32]:g} (float32)"
    half = f"{BOUNDS[torch.bfloat16]:g} (bfloat16)"
    for name in QUANTIZERS:
        bounds[name] = f"{single} and {half} of the same model's own gradients"
    return bounds


def _table(
    kind: str,
    heading: str,
    outcomes: Mapping[str, str],
) -> str:
    rows = [f"| {name} | {outcome} |" for name, outcome in outcomes.items()]
    return "\n".join([f"| {kind} | {heading} |", "|---|---|", *rows])


if __name__ == "__main__":
    print("\n\n".join(tables()))
