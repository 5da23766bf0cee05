"""Which examples methods see many times: as many as memory has room for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from laplace_lora_ext.messages import warn
from laplace_lora_ext.predictive.links import DEFAULT_LINK
from laplace_lora_ext.predictive.statistics import (
    PredictiveStatistics,
    bytes_of_statistics,
    has_statistics,
    of_present_fit,
)
from laplace_lora_ext.processes.exchange import count, rank
from laplace_lora_ext.processes.shards import (
    Share,
    data_size,
    examples_of,
    in_order_like,
    select_examples,
)

MOST_BYTES = 2**32
"""Of statistics that are kept, unless another number is asked for: 4.3 GB."""


def drawn(
    loader: Any,
    n_examples: int,
    seed: int,
) -> Any:
    """Draw examples from a larger loader before any pass, where possible."""
    if isinstance(loader, PredictiveStatistics) or data_size(loader) is None:
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return loader
    if count() > 1 and not Share(loader).is_dealt:
        return loader  # each rank has other examples
    examples = examples_of(loader)
    if len(examples) <= n_examples:
        return loader
    # Nothing else tells how large its data set is.
    assert isinstance(loader, DataLoader)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(examples), generator=generator)
    some = examples[order[:n_examples]]
    return in_order_like(loader, select_examples(loader.dataset, some.tolist()))


def statistics_within(
    la: Any,
    data: Iterable[Any] | PredictiveStatistics,
    max_bytes: int,
    seed: int,
    progress_bar: bool,
    link_approx: str = DEFAULT_LINK,
) -> PredictiveStatistics | None:
    """Compute statistics of at most `max_bytes`, and warn if examples are left out.

    Returns given statistics as they are, and None for a structure without any.
    """
    if not has_statistics(la):
        return None
    if isinstance(data, PredictiveStatistics):
        return of_present_fit(la, data, link_approx)
    la.check_model()
    of_example = bytes_of_statistics(la, link_approx)
    n_examples = max_bytes // of_example
    if n_examples == 0:
        raise ValueError(
            f"The statistics of one example take {of_example:,} bytes, more than "
            f"max_bytes={max_bytes:,}."
        )
    some = drawn(data, n_examples, seed)
    statistics = la.predictive_statistics(
        some,
        progress_bar,
        link_approx=link_approx,
        max_examples=n_examples,
    )
    n_left_out = statistics.n_left_out
    if some is not data:
        n_left_out += len(examples_of(data)) - n_examples
    if n_left_out and rank() == 0:
        n_all = len(statistics) + n_left_out
        warn(
            f"The prior precision is chosen by {len(statistics):,} of {n_all:,} "
            "examples, drawn at random: statistics of all would take "
            f"{n_all * of_example:,} bytes, more than max_bytes={max_bytes:,}."
        )
    return statistics
