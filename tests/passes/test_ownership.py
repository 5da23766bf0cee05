"""Codewords that tell examples apart, and rows whose gradients spell them."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from laplace_lora_ext.passes.ownership import NOBODY, SEVERAL, codewords, owners


@pytest.mark.parametrize(
    ("n_examples", "n_seeds"), [(2, 2), (3, 3), (4, 4), (6, 4), (10, 5), (20, 6), (64, 8)]
)
def test_a_few_seeds_tell_examples_apart(n_examples, n_seeds):
    words = codewords(n_examples)
    assert words.shape == (n_seeds, n_examples)
    assert len({tuple(word) for word in words.T.tolist()}) == n_examples
    assert len(set(words.sum(0).tolist())) == 1


@pytest.mark.parametrize("n_examples", [2, 3, 5, 6, 11])
def test_rows_of_one_example_spell_its_codeword_and_shared_rows_none(n_examples):
    words = codewords(n_examples)
    of_one = words[:, torch.arange(n_examples).flip(0)]
    assert owners(of_one, words).tolist() == list(range(n_examples))[::-1]
    shared = torch.stack([words[:, a] | words[:, b] for a, b in combinations(range(n_examples), 2)])
    assert (owners(shared.T, words) == SEVERAL).all()
    assert (owners(torch.zeros(len(words), 3).bool(), words) == NOBODY).all()


def test_a_gradient_that_is_lost_in_some_pass_names_no_example():
    words = codewords(6)
    assert owners(words & (torch.arange(4)[:, None] > 0), words)[0] == SEVERAL
