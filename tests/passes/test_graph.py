"""Models that overwrite or hook layers' values, and unbatched kernels."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes.graph import Graph
from laplace_lora_ext.passes.recorder import Recorder
from tests.support.dense import derivatives_of, jacobians
from tests.support.models import first_batch, pairs, plain_model, with_lora
from tests.support.posteriors import fitted, make, normal


def recorded_jacobians(model: nn.Module, x: Tensor) -> Tensor:
    """Compute Jacobians of the logits by a recorded pass."""
    blocks = find_blocks(model)
    recorder = Recorder(LogitsModel(model), blocks)
    Js, _ = recorder.jacobians(x)
    return Js


def assert_recorded(model: nn.Module, x: Tensor) -> None:
    """Compare a recorded pass with a model of which nothing is recorded."""
    found = recorded_jacobians(model, x)
    assert_close(found, jacobians(model, x))


@pytest.fixture
def x() -> Tensor:
    """Inputs of four examples."""
    ((x, _),) = pairs()
    return x


class Overwriting(nn.Module):
    """Changes its layer's input in place, after the layer has read it, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.overwrites = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        logits = self.first(x).tanh()
        if self.overwrites:
            x.add_(1)
        factor = x.sum(-1, keepdim=True)
        return logits * factor


def test_a_model_that_overwrites_what_its_layers_were_given_is_refused(x):
    model = with_lora(Overwriting(), "first")
    # It is the overwriting that is refused, and not the model.
    assert_recorded(model, x)
    model.overwrites = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recorded_jacobians(model, x)


def test_hooks_of_the_users_own_are_part_of_the_model(x):
    model = with_lora(Overwriting(), "first")
    for block in find_blocks(model):
        layer = block.rows.layer
        layer.register_forward_pre_hook(lambda layer, args: (args[0].sin(),))
        layer.register_forward_hook(lambda layer, args, output: output.mul_(1.5))
    assert_recorded(model, x)


class _Stopped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, *_: Tensor) -> None:
        """Give no gradient at all, which is not a gradient of zeros."""


class CalledTwice(nn.Module):
    """Calls its layer once more, where no gradient comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).tanh() + _Stopped.apply(self.first(x.sin()))


def test_calls_without_a_gradient_hold_back_no_other_call(x):
    model = with_lora(CalledTwice(), "first")
    Js = recorded_jacobians(model, x)
    weights = [block.weight for block in find_blocks(model)]
    for weight in weights:
        weight.requires_grad_()
    # By plain autograd, since torch.func refuses functions of this kind.
    of_weights = derivatives_of(model(x).flatten(), weights)
    expected = torch.cat([J.flatten(1) for J in of_weights], dim=1)
    assert_close(Js.flatten(0, 1), expected)


@torch.library.custom_op(
    "laplace_lora_tests::attention_backward", mutates_args=("dq", "dk", "dv")
)
def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Write into its arguments as FlashAttention 2 does, which vmap refuses.

    With scores S = q kᵀ / √d, weights P = softmax(S) and outputs P v, the slope of S is
    P (dP - Σ P dP), where dP = dout vᵀ.
    """
    scale = q.shape[-1] ** -0.5
    weights = (scale * q @ k.mT).softmax(-1)
    dv.copy_(weights.mT @ dout)
    of_weights = dout @ v.mT
    mean = (weights * of_weights).sum(-1, keepdim=True)
    of_scores = scale * weights * (of_weights - mean)
    dq.copy_(of_scores @ k)
    dk.copy_(of_scores.mT @ q)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return scaled_dot_product_attention(*inputs)

    @staticmethod
    def backward(ctx, dout: Tensor):  # pyright: ignore
        inputs = ctx.saved_tensors
        gradients = [torch.empty_like(each) for each in inputs]
        attention_backward(dout, *inputs, *gradients)
        return tuple(gradients)


class Attending(nn.Module):
    """A layer of attention, by a kernel of that kind or by torch's own."""

    def __init__(self, attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.query = nn.Linear(5, 4)
        self.value = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        # Of no layer, so that a gradient comes to keys which nobody asks for.
        key = x @ x.new_ones(5, 4)
        return self.head(self.attend(self.query(x), key, self.value(x)).mean(1))


def posterior_by(attend: Callable[..., Tensor], x: Tensor):
    y = torch.arange(len(x)) % 3
    la = make(with_lora(Attending(attend), "query", "value"))
    # A second batch, for which it is known what the kernel refuses.
    la.fit([(x, y), (x[:2], y[:2])])
    return la


# Few enough for all seeds at once, and rows enough for one seed.
@pytest.mark.parametrize("n_tokens", [3, 300])
def test_kernels_that_write_into_their_arguments_give_the_same_by_single_seeds(
    n_tokens,
):
    x = normal(4, n_tokens, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = posterior_by(_Attention.apply, x)
        expected = posterior_by(scaled_dot_product_attention, x)
        assert_close(ours.H.to_matrix(), expected.H.to_matrix())
        for link_approx in ("mean_field", "probit"):
            found = ours(x, link_approx=link_approx)
            assert_close(found, expected(x, link_approx=link_approx))
        found = ours.predictive_statistics([x]).moments(1.0)
        assert_close(found, expected.predictive_statistics([x]).moments(1.0))
    # It is found out once, and no further pass is tried in vain.
    assert ours.recorder.layouts.is_batchable is False
    assert expected.recorder.layouts.is_batchable is True
    messages = [str(warning.message) for warning in caught]
    assert len([each for each in messages if "one by one" in each]) == 1


class _Failing(torch.autograd.Function):
    """Has a backward pass that fails by an error of its own."""

    @staticmethod
    def forward(ctx, x: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


@pytest.mark.parametrize("error", [ValueError("theirs"), RuntimeError("theirs")])
def test_errors_of_a_model_are_not_taken_for_what_batching_can_not_do(error):
    model = plain_model()
    la = make(model)
    la.fit(pairs())
    ((x, _),) = pairs()

    def fail(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return _Failing.apply(output, error)

    with model.register_forward_hook(fail), pytest.raises(type(error), match="theirs"):
        la(x)
    assert la.recorder.layouts.is_batchable is not False


def test_no_graph_waits_for_the_garbage_collector(monkeypatch):
    logits_of_graphs: list[weakref.ref] = []
    initialise = Graph.__init__

    def note(self, *args) -> None:
        initialise(self, *args)
        # A plain reference would itself keep the graph alive.
        logits_of_graphs.append(weakref.ref(self.logits))

    monkeypatch.setattr(Graph, "__init__", note)
    # What other tests have left behind must not be taken for this one's.
    gc.collect()
    gc.disable()
    la = fitted("gpt2")
    la(first_batch(), link_approx="mean_field")
    alive = [logits() for logits in logits_of_graphs]
    gc.enable()
    # At least one of each batch of the fit, and one of the prediction.
    assert len(alive) > 2
    # A graph that refers to itself would live on until a collection.
    assert not any(each is not None for each in alive)
