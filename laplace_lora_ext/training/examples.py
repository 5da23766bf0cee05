"""Divides a data set into examples to train on and examples to hold out."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from laplace_lora_ext.processes import shards
from laplace_lora_ext.processes.exchange import count, of_first

_BATCH_SIZE = 8  # where the loader has batches of many sizes


def divided(
    loader: DataLoader, held_out: float, generator: torch.Generator | None = None, parts: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Divisions of a loader's examples, each holding out others; all in the data's order.

    Parameters
    ----------
    loader : DataLoader
        its data set must have a length; examples that its sampler leaves out are not used
    held_out : float
        the share of the examples to hold out, between 0 and 1
    generator : torch.Generator, optional
        chooses the examples; if omitted, every call holds out the same
    parts : int, default=1
        how many divisions

    Yields
    ------
    rest, held_out : Dataset
        what the `select` of a `datasets.Dataset` returns, or `torch.utils.data.Subset`s

    Raises
    ------
    ValueError
        If `held_out` is not between 0 and 1, or the data have no length or too few examples.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be between 0 and 1, not {held_out}.")
    data: Any = getattr(loader, "dataset", None)
    if not isinstance(data, Sized):
        raise ValueError(
            "To hold out examples, their number must be known: pass a DataLoader whose data set "
            "has a length."
        )
    if count() > 1 and not shards.Share(loader).is_dealt:
        raise ValueError(
            "To hold out examples of all ranks, pass a loader with a DistributedSampler, or "
            "accelerator.prepare(loader)."
        )
    places = shards.examples_of(loader)
    ends = [round(n * held_out * len(places)) for n in range(parts + 1)]
    sizes = [end - start for start, end in pairwise(ends)]
    if not 0 < min(sizes) <= max(sizes) < len(places):
        raise ValueError(f"{len(places)} examples are too few to hold out a share of {held_out:g}.")
    generator = generator or torch.Generator().manual_seed(0)
    order = of_first(places[torch.randperm(len(places), generator=generator)]).tolist()
    for start, end in pairwise(ends):
        yield chosen(data, order[:start] + order[end:]), chosen(data, order[start:end])


def taken(loader: DataLoader) -> Any:
    """A loader's data set, without examples that its sampler leaves out."""
    data: Any = loader.dataset
    places = shards.examples_of(loader)
    return data if len(places) == len(data) else chosen(data, places.tolist())


def in_order(examples: Any, like: DataLoader) -> DataLoader:
    """Batches of examples as another loader makes them, each example once and in the data's order.

    Of several processes, each gets its share.
    """
    makes_batches = like.batch_sampler is not None  # else the data set does
    batch_size = like.batch_size or (_BATCH_SIZE if makes_batches else None)
    return shards.in_order(examples, batch_size, like.collate_fn)


def chosen(data: Any, places: list[int]) -> Any:
    """Some examples of a data set; trainers know columns only of a `datasets.Dataset`."""
    places = sorted(places)
    return data.select(places) if hasattr(data, "select") else Subset(data, places)
