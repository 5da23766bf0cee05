"""Models that overwrite or hook layers' values, and unbatched kernels."""

import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
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


def sines_of_inputs(layer, args):
    (x,) = args
    return (x.sin(),)


def more_output(layer, args, output):
    return 1.5 * output


def test_hooks_of_the_users_own_are_part_of_the_model(x):
    model = with_lora(Overwriting(), "first")
    for block in find_blocks(model):
        layer = block.rows.layer
        layer.register_forward_pre_hook(sines_of_inputs)
        layer.register_forward_hook(more_output)
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
        of_sines = self.first(x.sin())
        without_gradient = _Stopped.apply(of_sines)
        with_gradient = self.first(x).tanh()
        return with_gradient + without_gradient


def test_calls_without_a_gradient_hold_back_no_other_call(x):
    model = with_lora(CalledTwice(), "first")
    Js = recorded_jacobians(model, x)
    weights = [block.weight for block in find_blocks(model)]
    for weight in weights:
        weight.requires_grad_()
    logits = model(x).flatten()
    # By plain autograd, since torch.func refuses functions of this kind.
    of_weights = derivatives_of(logits, weights)
    rows = [J.flatten(1) for J in of_weights]
    expected = torch.cat(rows, dim=1)
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
    scores = scale * q @ k.mT
    weights = scores.softmax(-1)
    dv.copy_(weights.mT @ dout)
    of_weights = dout @ v.mT
    products = weights * of_weights
    mean = products.sum(-1, keepdim=True)
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
        query = self.query(x)
        # Of no layer, so that a gradient comes to keys which nobody asks for.
        key = x @ x.new_ones(5, 4)
        value = self.value(x)
        attended = self.attend(query, key, value)
        return self.head(attended.mean(1))


@dataclass(frozen=True)
class Kernels:
    """Posteriors of one model by such a kernel and by torch's, and their inputs."""

    ours: Any
    expected: Any
    x: Tensor


def posterior_by(attend: Callable[..., Tensor], x: Tensor):
    model = with_lora(Attending(attend), "query", "value")
    y = torch.arange(len(x)) % 3
    batch = (x, y)
    # A second batch, for which it is known what the kernel refuses.
    smaller_batch = (x[:2], y[:2])
    la = make(model)
    la.fit([batch, smaller_batch])
    return la


@pytest.fixture(
    # Numbers of tokens.
    params=[
        pytest.param(3, id="seeds at once"),
        pytest.param(300, id="rows enough for one seed"),
    ]
)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    n_tokens = request.param
    x = normal(4, n_tokens, 5)
    return Kernels(
        ours=posterior_by(_Attention.apply, x),
        expected=posterior_by(scaled_dot_product_attention, x),
        x=x,
    )


def test_kernels_that_write_into_their_arguments_are_learnt(kernels):
    found = kernels.ours.H.to_matrix()
    expected = kernels.expected.H.to_matrix()
    assert_close(found, expected)


def test_kernels_that_write_into_their_arguments_predict(kernels):
    x = kernels.x
    for link_approx in ("mean_field", "probit"):
        found = kernels.ours(x, link_approx=link_approx)
        expected = kernels.expected(x, link_approx=link_approx)
        assert_close(found, expected)


def test_kernels_that_write_into_their_arguments_have_statistics(kernels):
    batches = [kernels.x]
    of_ours = kernels.ours.predictive_statistics(batches)
    of_torchs = kernels.expected.predictive_statistics(batches)
    found = of_ours.moments(1.0)
    expected = of_torchs.moments(1.0)
    assert_close(found.f_mu, expected.f_mu)
    assert_close(found.f_var, expected.f_var)


def test_that_a_kernel_takes_one_seed_at_a_time_is_found_out_once(kernels):
    # A fit with rows enough for one seed has not yet asked for more.
    for la in (kernels.ours, kernels.expected):
        la(kernels.x, link_approx="probit")
    # No further pass is tried in vain.
    assert kernels.ours.recorder.layouts.is_batchable is False
    assert kernels.expected.recorder.layouts.is_batchable is True


def test_that_kernels_take_one_seed_at_a_time_is_said_once():
    x = normal(4, 3, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la = posterior_by(_Attention.apply, x)
        la(x)
    messages = [str(warning.message) for warning in caught]
    (message,) = [each for each in messages if "one by one" in each]
    assert "under torch.func.vmap (" in message


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


@pytest.fixture
def no_garbage_collection():
    # What other tests have left behind must not be taken for this one's.
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_no_graph_waits_for_the_garbage_collector(monkeypatch):
    logits_of_graphs: list[weakref.ref] = []
    initialise = Graph.__init__

    def note(self, *args) -> None:
        initialise(self, *args)
        # A plain reference would itself keep the graph alive.
        logits = weakref.ref(self.logits)
        logits_of_graphs.append(logits)

    monkeypatch.setattr(Graph, "__init__", note)
    la = fitted("gpt2")
    batch = first_batch()
    la(batch, link_approx="mean_field")
    # At least one of each batch of the fit, and one of the prediction.
    assert len(logits_of_graphs) > 2
    # A graph that refers to itself would live on until a collection.
    for logits in logits_of_graphs:
        assert logits() is None
