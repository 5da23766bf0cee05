"""Finds the example that each row of a layer belongs to, by back-propagating some at a time.

A row belongs to an example if that example's logits, and no others, depend on what the layer makes
of it. Gradients show this; sizes don't. Seed s reaches the examples whose codeword has bit s, and
all codewords have equally many bits. The seeds that give a row a gradient other than 0 are the
codeword of its example. Rows that several examples share get one from more seeds than that.
"""

from __future__ import annotations

from itertools import combinations, count
from math import comb

import torch

NOBODY = -1
"""The owner of a row that no logit depends on."""

SEVERAL = -2
"""The owner of a row that logits of more than one example depend on."""


def codewords(n_examples: int) -> torch.Tensor:
    """`(S, B)` booleans: the fewest seeds S that tell B examples apart, 4 for 6 and 5 for 10."""
    size = next(size for size in count(1) if comb(size, size // 2) >= n_examples)
    words = torch.zeros(size, n_examples, dtype=torch.bool)
    for example, bits in zip(range(n_examples), combinations(range(size), size // 2), strict=False):
        words[list(bits), example] = True
    return words


def owners(reached: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """`(R,)` indices of the examples that rows belong to.

    Parameters
    ----------
    reached : torch.Tensor
        `(S, R)` booleans: whether a row's gradient was other than 0
    words : torch.Tensor
        `(S, B)` of `codewords`
    """
    powers = 2 ** torch.arange(len(words), device=reached.device)
    example_of = torch.full((2 ** len(words),), SEVERAL, device=reached.device)
    example_of[0] = NOBODY
    numbers = powers @ words.to(powers)
    example_of[numbers] = torch.arange(words.shape[1], device=reached.device)
    return example_of[(powers[:, None] * reached).sum(0)]
