"""Finds out which rows of a recorded pass belong to which example, and remembers what lasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch

from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.models.positions import Positions
from laplace_lora_ext.passes.graph import Graph
from laplace_lora_ext.passes.layouts import (
    ExamplesFirst,
    FixedLayout,
    Layout,
    OneAtATime,
    PositionsFirst,
    Scattered,
    Together,
)
from laplace_lora_ext.passes.ownership import NOBODY, SEVERAL, codewords, owners

_FIXED: Sequence[FixedLayout] = (ExamplesFirst(), PositionsFirst())


class _Known(Enum):
    """What is known of a call that has no fixed layout."""

    UNREACHED = auto()  # no gradient has come to it yet
    EVERY_BATCH = auto()  # its rows must be told apart in every batch
    SHARED = auto()  # some of its rows belong to several examples


class _Site(NamedTuple):
    """A call of a LoRA layer in a pass; `lora_A` and `lora_B` see the same rows.

    Attributes
    ----------
    layer : str
    place, n_calls : int
        which one of how many calls of the layer
    shape : torch.Size
        of its rows, without their size d
    """

    layer: str
    place: int
    n_calls: int
    shape: torch.Size

    @property
    def key(self) -> tuple[Any, ...]:
        """What stays the same in a batch of other sizes."""
        return self.layer, self.place, self.n_calls, len(self.shape)


def any_shared(known: Mapping[Any, Any]) -> bool:
    """Whether passes have learnt of rows that several examples share."""
    return any(value is _Known.SHARED for value in known.values())


class Assignment:
    """Which rows of each call in a pass belong to which example.

    The first batch of two or more examples shows it. Where sizes alone decide, the layout is
    remembered; where a router or the number of images does, every batch is examined, and so is one
    whose examples the model may have put in another order. Where examples share rows, they are
    back-propagated one at a time.

    Parameters
    ----------
    graph : Graph
        of the pass
    blocks : sequence of Block
        one for each layer of the graph
    positions : Positions
    known : dict
        what earlier passes have learnt; this one adds to it

    Attributes
    ----------
    shared : str or None
        a layer with rows that several examples share
    layouts : list of lists of Layout
        of each layer's calls
    """

    def __init__(
        self, graph: Graph, blocks: Sequence[Block], positions: Positions, known: dict[Any, Any]
    ) -> None:
        self._graph = graph
        self._blocks = blocks
        self._positions = positions
        self._known = known
        n_examples = positions.n_examples
        self._in_order = n_examples == 1 or not graph.reorders(positions)
        self._sites = [
            [
                _Site(block.lora_layer, place, len(calls), call.rows)
                for place, call in enumerate(calls)
            ]
            for block, calls in zip(blocks, graph.calls, strict=True)
        ]
        self._found: dict[_Site, Layout] = {}
        self._all = {site: None for sites in self._sites for site in sites}  # in order, and once
        self.shared = next((s.layer for s in self._all if known.get(s.key) is _Known.SHARED), None)
        if self.shared is None and n_examples > 1 and self._is_open():
            self._learn(self._owners())
        self.layouts = [[self._layout(site) for site in sites] for sites in self._sites]

    def _layout(self, site: _Site) -> Layout:
        if self.shared is not None:
            return OneAtATime(self.shared)
        if self._positions.n_examples == 1:
            return Together()
        return self._found.get(site) or self._remembered(site) or self._unimportant(site)

    def _is_open(self) -> bool:
        """Whether the owners of some call that gradients reach are still unknown."""
        open_sites = {site for site in self._all if self._remembered(site) is None}
        unreached = {s for s in open_sites if self._known.get(s.key) is _Known.UNREACHED}
        if open_sites > unreached:
            return True
        calls = [
            call
            for sites, calls in zip(self._sites, self._graph.calls, strict=True)
            for site, call in zip(sites, calls, strict=True)
            if site in unreached
        ]
        return bool(calls) and self._graph.reaches(calls, self._vector())

    def _owners(self) -> dict[_Site, torch.Tensor]:
        """`(R,)` indices of the examples that the rows of each call belong to."""
        words = codewords(self._positions.n_examples)
        reached: dict[_Site, torch.Tensor] = {}

        def note(seeds: slice, index: int, gradients: dict[int, torch.Tensor]) -> None:
            block = self._blocks[index]
            for place, of_call in gradients.items():
                if not torch.isfinite(of_call).all():
                    raise ValueError(f"LoRA layer {block.name}: non-finite gradients")
                site = self._sites[index][place]
                table = reached.setdefault(site, torch.zeros(len(words), site.shape.numel()).bool())
                reached_rows = block.rows.output_rows(of_call.detach()).any(-1)
                table[seeds] |= reached_rows.reshape(len(of_call), -1).cpu()

        of_logits = self._positions.logits_of(words).to(self._graph.logits)
        vectors = of_logits[..., None] * self._vector()
        at_once = self._graph.seeds_at_once
        for start in range(0, len(words), at_once):
            seeds = slice(start, start + at_once)
            self._graph.back_propagate(vectors[seeds], partial(note, seeds), retain_graph=True)
        return {site: owners(table, words) for site, table in reached.items()}

    def _vector(self) -> torch.Tensor:
        """`(C,)` random numbers, so that gradients do not cancel to 0 but by chance."""
        numbers = torch.randn(
            self._graph.logits.shape[1], generator=torch.Generator().manual_seed(0)
        )
        return numbers.to(self._graph.logits)

    def _learn(self, owners: dict[_Site, torch.Tensor]) -> None:
        for site in self._all:
            of_rows = owners.get(site)
            if of_rows is None or (of_rows == NOBODY).all():
                self._known.setdefault(site.key, _Known.UNREACHED)
            elif (of_rows == SEVERAL).any():
                self._known[site.key] = _Known.SHARED
                self.shared = site.layer
            else:
                self._learn_layout(site, of_rows)

    def _learn_layout(self, site: _Site, owners: torch.Tensor) -> None:
        fitting = [one for one in _FIXED if one.explains(owners, site.shape, self._positions)]
        self._found[site] = fitting[0] if fitting else Scattered(owners)
        before = self._known.get(site.key, _Known.UNREACHED)
        if not fitting or not self._lasts(site) or before not in (_Known.UNREACHED, *fitting):
            self._known[site.key] = _Known.EVERY_BATCH
        elif len(fitting) == 1:
            self._known[site.key] = fitting[0]

    def _remembered(self, site: _Site) -> FixedLayout | None:
        layout = self._known.get(site.key)
        if not (isinstance(layout, FixedLayout) and self._in_order and self._lasts(site)):
            return None
        return layout if layout.allows(site.shape, self._positions) else None

    def _lasts(self, site: _Site) -> bool:
        """Whether sizes, and not a batch's contents, decide which rows belong to which example."""
        positions, shape = self._positions, site.shape
        if "experts" in site.layer.split("."):  # a router picks their rows
            return False
        if positions.mixed:
            return shape == (positions.n_rows, positions.length)
        by_example = (positions.n_examples, positions.n_rows, positions.n_tokens)
        return len(shape) > 1 or shape.numel() in by_example

    def _unimportant(self, site: _Site) -> Layout:
        """Any layout that fits, since rows without a gradient do not count."""
        fixed = (layout for layout in _FIXED if layout.allows(site.shape, self._positions))
        return next(fixed, Scattered(torch.full((site.shape.numel(),), NOBODY)))
