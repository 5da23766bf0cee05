"""Models that overwrite or hook layers' values, and unbatched kernels."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes.graph import Graph
from laplace_lora_ext.passes.recorder import Recorder
from tests.support.dense import derivatives_of, jacobians
from tests.support.models import pairs, ragged_batches, with_lora
from tests.support.posteriors import fitted, generator, make


def recorded_jacobians(
    model: nn.Module,
    x: torch.Tensor,
) -> torch.Tensor:
    """Compute Jacobians of the logits by a recorded pass."""
    recorder = Recorder(LogitsModel(model), find_blocks(model))
    Js, _ = recorder.jacobians(x)
    return Js


class Overwriting(nn.Module):
    """Changes its layer's input in place, after the layer has read it, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.overwrites = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        logits = self.first(x).tanh()
        if self.overwrites:
            x.add_(1)
        return logits * x.sum(-1, keepdim=True)


def test_a_model_that_overwrites_what_its_layers_were_given_is_refused():
    model = with_lora(Overwriting(), "first")
    ((x, _),) = pairs()
    assert_close(recorded_jacobians(model, x), jacobians(model, x))
    model.overwrites = True
    message = r"overwrites .* first\.lora_A.*target_modules"
    with pytest.raises(NotImplementedError, match=message):
        recorded_jacobians(model, x)


def sines_of_inputs(layer, args):
    (x,) = args
    return (x.sin(),)


def more_output(layer, args, output):
    return 1.5 * output


def test_hooks_of_the_users_own_are_part_of_the_model():
    model = with_lora(Overwriting(), "first")
    ((x, _),) = pairs()
    for block in find_blocks(model):
        layer = block.rows.layer
        layer.register_forward_pre_hook(sines_of_inputs)
        layer.register_forward_hook(more_output)
    assert_close(recorded_jacobians(model, x), jacobians(model, x))


class _Stopped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, *_: torch.Tensor) -> None:
        """Give no gradient at all, which is not a gradient of zeros."""


class CalledTwice(nn.Module):
    """Calls its layer once more, where no gradient comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        without_gradient = _Stopped.apply(self.first(x.sin()))
        return self.first(x).tanh() + without_gradient


def test_calls_without_a_gradient_hold_back_no_other_call():
    model = with_lora(CalledTwice(), "first")
    ((x, _),) = pairs()
    Js = recorded_jacobians(model, x)
    weights = [block.weight.requires_grad_() for block in find_blocks(model)]
    # By plain autograd, since torch.func refuses functions of this kind.
    of_weights = derivatives_of(model(x).flatten(), weights)
    expected = torch.cat([J.flatten(1) for J in of_weights], dim=1)
    assert_close(Js.flatten(0, 1), expected)


@torch.library.custom_op(
    "laplace_lora_tests::attention_backward",
    mutates_args=("dq", "dk", "dv"),
)
def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Write into its arguments as FlashAttention 2 does, which vmap refuses."""
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
    def forward(ctx, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return scaled_dot_product_attention(*inputs)

    @staticmethod
    def backward(ctx, dout: torch.Tensor):  # pyright: ignore
        gradients = [torch.empty_like(each) for each in ctx.saved_tensors]
        attention_backward(dout, *ctx.saved_tensors, *gradients)
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = x @ x.new_ones(5, 4)
        attended = self.attend(self.query(x), key, self.value(x))
        return self.head(attended.mean(1))


@pytest.mark.parametrize(
    "n_tokens",
    [
        pytest.param(3, id="seeds at once"),
        pytest.param(300, id="rows enough for one seed"),
    ],
)
def test_kernels_that_write_into_their_arguments_take_one_seed_at_a_time(n_tokens):
    x = torch.randn(4, n_tokens, 5, generator=generator()).double()
    y = torch.tensor([0, 1, 2, 1])

    def posterior(attend):
        la = make(with_lora(Attending(attend), "query", "value"))
        la.fit([(x, y), (x[:2], y[:2])])
        return la

    ours = posterior(_Attention.apply)
    expected = posterior(scaled_dot_product_attention)
    assert_close(ours.H.to_matrix(), expected.H.to_matrix())
    found = ours.predictive_statistics([x]).moments(1.0)
    moments = expected.predictive_statistics([x]).moments(1.0)
    assert_close(found.f_mu, moments.f_mu)
    assert_close(found.f_var, moments.f_var)
    for link_approx in ("mean_field", "probit"):
        found = ours(x, link_approx=link_approx)
        assert_close(found, expected(x, link_approx=link_approx))
    # What was found out once is remembered: no further pass is tried in vain.
    assert ours.recorder.layouts.seeds_at_most == 1
    assert expected.recorder.layouts.seeds_at_most == math.inf


@pytest.fixture
def no_garbage_collection():
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
        logits_of_graphs.append(weakref.ref(self.logits))

    monkeypatch.setattr(Graph, "__init__", note)
    la = fitted("gpt2")
    la(ragged_batches()[0], link_approx="mean_field")
    assert len(logits_of_graphs) > 2
    assert all(logits() is None for logits in logits_of_graphs)
