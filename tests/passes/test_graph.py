"""Models that overwrite or hook what their layers see, and kernels that no batched pass takes."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes.graph import Graph
from laplace_lora_ext.passes.recorder import Recorder
from tests.support.dense import jacobians as dense_jacobians
from tests.support.models import pairs, ragged_batches, with_lora
from tests.support.posteriors import fitted, make


class Overwriting(nn.Module):
    """Changes its layer's input in place, after the layer has read it, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.overwrites = nn.Linear(5, 3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        logits = self.first(x).tanh()
        if self.overwrites:
            x.add_(1)
        return logits * x.sum(-1, keepdim=True)


def test_a_model_that_overwrites_what_its_layers_were_given_is_refused():
    model, (x, _) = with_lora(Overwriting(), "first"), pairs()[0]
    Js, _ = Recorder(LogitsModel(model), find_blocks(model)).jacobians(x)
    torch.testing.assert_close(Js, dense_jacobians(model, x))
    model.overwrites = True
    with pytest.raises(
        NotImplementedError,
        match=r"overwrites .* first\.lora_A.*target_modules",
    ):
        Recorder(LogitsModel(model), find_blocks(model)).jacobians(x)


def test_hooks_of_the_users_own_are_part_of_the_model():
    model, (x, _) = with_lora(Overwriting(), "first"), pairs()[0]
    for block in find_blocks(model):
        block.rows.layer.register_forward_hook(lambda *called: 1.5 * called[-1])
        block.rows.layer.register_forward_pre_hook(lambda _, args: (args[0].sin(),))
    Js, _ = Recorder(LogitsModel(model), find_blocks(model)).jacobians(x)
    torch.testing.assert_close(Js, dense_jacobians(model, x))


class _Stopped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, *_: torch.Tensor) -> None:
        """No gradient at all, which is not a gradient of zeros."""


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).tanh() + _Stopped.apply(self.first(x.sin()))


def test_calls_without_a_gradient_hold_back_no_other_call():
    model, (x, _) = with_lora(CalledTwice(), "first"), pairs()[0]
    Js, _ = Recorder(LogitsModel(model), find_blocks(model)).jacobians(x)
    weights = [block.weight.requires_grad_() for block in find_blocks(model)]
    rows = [torch.autograd.grad(f, weights, retain_graph=True) for f in model(x).flatten()]
    expected = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    torch.testing.assert_close(Js.flatten(0, 1), expected)


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
    """Write into its arguments, as FlashAttention 2 does, which `torch.func.vmap` refuses."""
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    dv.copy_(weights.mT @ dout)
    of_weights = dout @ v.mT
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    dq.copy_(of_scores @ k / q.shape[-1] ** 0.5)
    dk.copy_(of_scores.mT @ q / q.shape[-1] ** 0.5)


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
        self.attend, self.n_batched = attend, 0
        self.query, self.value = nn.Linear(5, 4), nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.value(x)
        return self.head(self.attend(self.query(x), x @ x.new_ones(5, 4), value).mean(1))


@pytest.mark.parametrize(
    "n_tokens",
    [3, 300],
    ids=["seeds at once", "rows enough for one seed"],
)
def test_kernels_that_write_into_their_arguments_take_one_seed_at_a_time(
    n_tokens,
):
    x = torch.randn(4, n_tokens, 5, generator=torch.Generator().manual_seed(0)).double()
    y = torch.tensor([0, 1, 2, 1])
    ours, expected = (
        make(with_lora(Attending(attend), "query", "value").double())
        for attend in (
            _Attention.apply,
            scaled_dot_product_attention,
        )
    )
    for la in (ours, expected):
        la.fit([(x, y), (x[:2], y[:2])])
    torch.testing.assert_close(ours.H.to_matrix(), expected.H.to_matrix())
    moments = ours.predictive_statistics([x]).moments(1.0)
    for found, other in zip(
        moments,
        expected.predictive_statistics([x]).moments(1.0),
        strict=True,
    ):
        torch.testing.assert_close(found, other)
    for link_approx in ("mean_field", "probit"):
        probabilities = expected(x, link_approx=link_approx)
        torch.testing.assert_close(ours(x, link_approx=link_approx), probabilities)
    # What was found out once is remembered: no further pass is tried in vain.
    assert ours.recorder.layouts.seeds_apart
    assert not expected.recorder.layouts.seeds_apart


def test_no_graph_waits_for_the_garbage_collector(monkeypatch):
    graphs: list[weakref.ref] = []
    initialise = Graph.__init__

    def note(self, *args) -> None:
        initialise(self, *args)
        graphs.append(weakref.ref(self.logits))

    monkeypatch.setattr(Graph, "__init__", note)
    gc.collect()
    gc.disable()
    try:
        la = fitted("gpt2")
        la(ragged_batches()[0], link_approx="mean_field")
        assert len(graphs) > 2
        assert not [graph for graph in graphs if graph() is not None]
    finally:
        gc.enable()
