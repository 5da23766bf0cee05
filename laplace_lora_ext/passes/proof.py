"""Prove that rows are each example's own, by gradients of some examples.

A layer's rows `(n, ..., d)` are taken for `(B, n / B, ..., d)`. Sizes don't show
whether they are, but gradients do: those of some examples' logits must leave exactly
nothing in the rows of all others. Seed s has the examples whose codeword has bit s. All
codewords have equally many bits, so that for any two examples some seed has the first
and not the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb

import torch
from torch import Tensor

from laplace_lora_ext.models.batches import Positions
from laplace_lora_ext.models.weights import Block, read
from laplace_lora_ext.passes.graph import Arrived, Graph

_Site = tuple[str, int, int]
"""A LoRA layer, whose two halves see the same rows, and which of how many calls of
it."""


def is_proven(
    graph: Graph,
    blocks: Sequence[Block],
    positions: Positions,
    known: dict[_Site, int],
) -> bool:
    """Prove that the rows of a pass are each example's own, or find that they are not.

    Texts are proven in the first batch, in the first one of two, four, eight and so on
    or more examples, and in each until every layer has had a gradient. Sizes don't tell
    what rows other batches have, such as those of images: each of them is proven.

    `known` maps sites of earlier passes to the size of the largest batch that proved
    them; this one adds its own. A gradient that is not finite is a `ValueError`.
    """
    n_examples = positions.n_examples
    if n_examples == 1:
        return True
    shapes: dict[_Site, torch.Size] = {}
    for index, calls in enumerate(graph.calls):
        sites = _sites(graph, blocks, index)
        for site, call in zip(sites, calls, strict=True):
            shapes[site] = call.rows
    # Cheap, and surely wrong: as where a router has picked any number of rows.
    for shape in shapes.values():
        if not shape or shape[0] % n_examples:
            return False
    size = n_examples.bit_length()  # 2 for 2 and 3 examples, 3 for 4 to 7, and so on
    # Which row a token has does not depend on what the text says, so that these stay
    # proven.
    lasting: list[_Site] = []
    all_known = True
    for site, shape in shapes.items():
        if not _lasts(site[0], shape, positions):
            all_known = False
            continue
        lasting.append(site)
        if known.get(site, 0) < size:
            all_known = False
    if all_known:
        return True
    # Passes of the proof are few: about log2 of the number of examples, and none in
    # most batches.
    words = codewords(n_examples)
    reached = _reached(graph, blocks, positions, words)
    strays: list[Tensor] = []  # whether seeds of some examples arrive at others
    for rows in reached.values():
        is_other = ~words.to(rows.device)
        arrives = rows.any(-1)
        strays.append((arrives & is_other).any())
    if any(read(strays)):
        return False
    for site in lasting:
        if _is_conclusive(reached.get(site)):
            known[site] = size
    return True


def codewords(n_examples: int) -> Tensor:
    """Choose the fewest seeds `(S, B)` that tell B examples apart.

    4 seeds for 6 examples, and 5 for 10.
    """
    # Half of the bits: of all words of a length, most have these, and none contains
    # another.
    size = 1
    while comb(size, size // 2) < n_examples:
        size += 1
    words = torch.zeros(size, n_examples, dtype=torch.bool)
    choices = combinations(range(size), size // 2)
    # Some are left over.
    for example, bits in zip(range(n_examples), choices, strict=False):
        words[list(bits), example] = True
    return words


def _sites(
    graph: Graph,
    blocks: Sequence[Block],
    index: int,
) -> list[_Site]:
    layer = blocks[index].rows.site
    n_calls = len(graph.calls[index])
    return [(layer, place, n_calls) for place in range(n_calls)]


def _reached(
    graph: Graph,
    blocks: Sequence[Block],
    positions: Positions,
    words: Tensor,
) -> dict[_Site, Tensor]:
    """Find the rows `(S, B, rows)` of each site that examples' seeds reach."""
    n_seeds, n_examples = words.shape
    reached: dict[_Site, Tensor] = {}
    layers: list[str] = []  # that gradients came to
    finite: list[Tensor] = []  # whether they are
    # Random numbers, so that gradients do not cancel to 0 but by chance.
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(graph.logits.shape[1], generator=generator)
    chosen = positions.logits_of(words).to(graph.logits)  # (S, B)
    vectors = chosen[..., None] * vector.to(graph.logits)

    def note(arrived: Arrived) -> None:
        sites = _sites(graph, blocks, arrived.index)
        for call, gradients in zip(arrived.calls, arrived.gradients, strict=True):
            site = sites[graph.calls[arrived.index].index(call)]
            layers.append(call.layer)
            finite.append(torch.isfinite(gradients).all())
            # Exactly nothing, not little: no sum of other examples' numbers has gone
            # in.
            rows = gradients.detach().any(-1)
            rows = rows.reshape(len(rows), n_examples, -1)
            if site not in reached:
                reached[site] = rows.new_zeros(n_seeds, *rows.shape[1:])
            reached[site][arrived.seeds] |= rows

    graph.back_propagate(vectors, graph.seeds_at_once, note, retain_graph=True)
    for layer, is_finite in zip(layers, read(finite), strict=True):
        if not is_finite:
            raise ValueError(f"Weight {layer}: non-finite gradients")
    return reached


def _lasts(
    layer: str,
    shape: torch.Size,
    positions: Positions,
) -> bool:
    """Tell whether later batches of this size have rows in the same order."""
    # A router picks their rows.
    if not positions.is_text or "experts" in layer.split("."):
        return False
    # Rows of examples, or of all tokens in one dimension. Any others, such as windows,
    # may be in another order next time.
    by_example = shape[0] in (positions.n_examples, positions.n_rows)
    return by_example or shape.numel() == positions.n_tokens


def _is_conclusive(rows: Tensor | None) -> bool:
    """Tell whether gradients came, at rows that tell layouts apart."""
    if rows is None:
        return False
    rows = rows.any(0)
    # With as many positions as examples, (T, B) and (B, T) have the same row on the
    # diagonal.
    if rows.shape[0] == rows.shape[1]:
        diagonal = torch.eye(
            len(rows),
            dtype=torch.bool,
            device=rows.device,
        )
        rows = rows & ~diagonal
    return bool(rows.any())
