"""Numbers of examples: the same in any batch."""

import torch
from torch import Tensor

from laplace_lora_ext.draws import Draws, draw_seed
from tests.support.posteriors import generator


def drawn(*examples: int, seed: int = 0) -> Tensor:
    return Draws(seed, torch.tensor(examples)).uniform(2, 3)


def test_each_example_and_each_seed_has_numbers_of_its_own():
    of_all = drawn(7, 7, 8, 9)
    assert of_all.shape == (2, 4, 3)
    # Rows of one example follow each other.
    assert torch.equal(torch.cat([drawn(7, 7), drawn(8, 9)], dim=1), of_all)
    assert len(of_all.unique()) == of_all.numel()
    assert not (drawn(7, 7, 8, 9, seed=1) == of_all).any()
    assert 0 <= of_all.min() < of_all.max() < 1


def test_signs_are_either_as_often():
    signs = Draws(0, torch.arange(1000)).signs(1)
    assert signs.unique().tolist() == [-1, 1]
    # Three standard deviations of a mean of 1,000.
    assert signs.mean().abs() < 0.1


def test_a_seed_follows_its_generator_or_that_of_torch():
    assert draw_seed(generator(1)) == draw_seed(generator(1))
    torch.manual_seed(3)
    first = draw_seed(None)
    torch.manual_seed(3)
    assert draw_seed(None) == first
