"""Prints what works with which model, adapter, precision and wrapper.

That is `benchmarks/results/compatibility.md`.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from tests.compatibility.families import COLUMNS, FAMILIES
from tests.compatibility.kinds import ADAPTERS, BOUNDS, PRECISIONS, QUANTIZERS, WRAPPERS
from tests.support.matrices import CASES


def tables() -> Iterator[str]:
    """Write each table in markdown."""
    of_families = {
        name: [family.outcome(column) for column in COLUMNS]
        for name, family in FAMILIES.items()
    }
    yield _table("family", COLUMNS, of_families)
    of_adapters = {name: [kind.outcome] for name, kind in ADAPTERS.items()}
    # Tests of these have no `Kind`, for all have the same outcome.
    of_adapters |= {name: ["exact, one example at a time"] for name in CASES}
    yield _table("adapter", ["outcome"], of_adapters)
    of_wrappers = {name: [kind.outcome] for name, kind in WRAPPERS.items()}
    yield _table("wrapper", ["outcome"], of_wrappers)
    within = {name: [f"{p.bound:g} of float64"] for name, p in PRECISIONS.items()}
    single = f"{BOUNDS[torch.float32]:g} (float32)"
    half = f"{BOUNDS[torch.bfloat16]:g} (bfloat16)"
    of_same = f"{single} and {half} of the same model's own gradients"
    within |= {name: [of_same] for name in QUANTIZERS}
    yield _table("precision", ["covariances within"], within)


def _table(
    kind: str, headings: Sequence[str], outcomes: Mapping[str, Sequence[str]]
) -> str:
    rows = [[kind, *headings], *([name, *row] for name, row in outcomes.items())]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n\n".join(tables()))
