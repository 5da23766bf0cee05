"""The way to products that a batch shows to be right."""

import pytest
import torch

from laplace_lora_ext.text.perturbations import CentralDifference, ForwardMode
from laplace_lora_ext.text.proof import proven

VALUES = [torch.tensor([0.5, -1.0, 2.0]).double()]
DIRECTION = [torch.tensor([1.0, 1.0, -0.5]).double()]


def smooth(values):
    (v,) = values
    return torch.stack([(v * place).sin() for place in (0.3, 0.7, 1.1)])


class WrongForward(torch.autograd.Function):
    """Right in value and in reverse, twice too large in forward mode."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Nothing is kept."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * tangent


class NoForward(WrongForward):
    @staticmethod
    def jvp(ctx, tangent):
        raise NotImplementedError("no forward-mode derivative")


def rounded(values):
    """As in half precision: differences of near numbers are rounding."""
    exact = smooth(values)
    return exact + ((exact.detach() * 16).round() / 16 - exact.detach())


def test_differences_are_taken_where_both_ways_agree():
    # In float64 the smallest step is the best: its error falls with the square of the step.
    assert proven(smooth, VALUES, DIRECTION) == CentralDifference(1e-3)


def test_forward_mode_is_taken_where_differences_drown():
    assert proven(rounded, VALUES, DIRECTION) == ForwardMode()


def test_differences_are_taken_where_forward_mode_is_wrong_or_missing():
    for identity in (WrongForward, NoForward):
        way = proven(lambda v, f=identity: smooth([f.apply(v[0])]), VALUES, DIRECTION)
        assert isinstance(way, CentralDifference)


def test_where_no_way_is_right_an_error_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"no forward-mode.*float32"):
        proven(lambda v: rounded([NoForward.apply(v[0])]), VALUES, DIRECTION)
    for scale in (1, 1e-3):
        with pytest.raises(RuntimeError, match=r"Neither.*float32"):
            proven(lambda v, by=scale: by * rounded([WrongForward.apply(v[0])]), VALUES, DIRECTION)


def test_the_weights_stay_without_gradients():
    proven(rounded, VALUES, DIRECTION)
    assert not VALUES[0].requires_grad
    assert VALUES[0].grad is None
