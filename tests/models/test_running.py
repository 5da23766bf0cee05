"""Threads share a model in turns, or run it together; no pass leaves anything."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from inspect import signature
from threading import Barrier, BrokenBarrierError, Event, get_ident
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import Tree, Turns, evaluating, put_back
from tests.support.dense import full_rank
from tests.support.models import (
    N_CLASSES,
    built,
    first_batch,
    lora_model,
    pairs,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import HOSTS_STRUCTURES, fitted, generator, make

# --- threads --------------------------------------------------------------------------


def test_fits_statistics_and_predictions_of_one_model_exclude_each_other(la, batch):
    batches = ragged_batches()
    expected = la(batch)

    # Weights that another thread draws or moves would show here.
    def predict_the_same() -> None:
        with torch.device("meta"):  # as `set_default_device` has it
            found = la(batch)
        assert_close(found, expected, rtol=0, atol=0)

    uses = [
        partial(la.fit, batches),
        partial(la.predictive_statistics, batches),
        partial(la, batch, pred_type="nn", n_samples=2),
        predict_the_same,
    ]
    with ThreadPoolExecutor(max_workers=2) as pool:
        # Each often enough that they meet.
        for future in [pool.submit(use) for use in uses * 2]:
            # Raises what its thread has raised.
            future.result()


def meet(
    model: nn.Module, uses: list[Callable[[], Any]], timeout: float = 20
) -> list[Any]:
    """Use a model by two threads, each of which waits for the other one within it.

    An error is returned as a result.
    """
    barrier = Barrier(2, timeout=timeout)
    met = set()

    def wait(*_: Any) -> None:
        if get_ident() not in met:
            met.add(get_ident())
            barrier.wait()

    handle = model.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(use) for use in uses]
    handle.remove()
    return [future.exception() or future.result() for future in futures]


def test_two_threads_are_within_the_model_at_once_where_variances_are_learnt():
    batches = ragged_batches()[:2]
    la = fitted(batches=batches)
    la.amortize(batches)
    expected = [la(batch, pred_type="amortized") for batch in batches]
    model = la.model.model.train()
    before = [dict(vars(module)) for module in model.modules()]
    uses = [partial(la, batch, pred_type="amortized") for batch in batches]
    found = meet(la.model.transformer, uses)
    for each, right in zip(found, expected, strict=True):
        assert torch.equal(each, right)
    uses = [partial(la.predict_proba, x, pred_type="amortized") for x in batches]
    for each in meet(la.model.transformer, uses):
        assert each.shape == (3, N_CLASSES)
    assert [dict(vars(m)) for m in model.modules()] == before
    # No other thread is within a model that is changed, or whose answers hooks read.
    answering = fitted("gpt2", batches)
    answering.amortize(batches)
    answer = partial(answering, batches[0], pred_type="amortized")
    exact = partial(la, batches[0])
    for pair in [exact, uses[0]], [exact] * 2, [answer] * 2:
        model = (answering if answer in pair else la).model.transformer
        found = meet(model, pair, 0.2)
        assert any(isinstance(each, BrokenBarrierError) for each in found)


def test_who_waits_for_a_turn_alone_is_not_passed_over():
    turns = Turns()
    together = partial(turns.together, "a model", nullcontext)
    is_within, may_leave = Event(), Event()
    entered = []

    def enter(turn: Any, name: str) -> None:
        with turn():
            entered.append(name)
            is_within.set()
            assert may_leave.wait(20)

    with ThreadPoolExecutor(4) as pool:
        pool.submit(enter, together, "first")
        assert is_within.wait(20)
        pool.submit(enter, partial(turns.together, "another", nullcontext), "other")
        pool.submit(enter, turns.alone, "alone")
        while not turns._n_waiting:
            sleep(0.001)
        pool.submit(enter, together, "late")
        sleep(0.1)
        assert entered == ["first"]
        may_leave.set()


def test_a_session_within_another_one_has_nothing_to_do():
    model = LogitsModel(lora_model("bert"))
    with model.running():
        tree = model.tree
        model.model.more = nn.Linear(1, 1)
        with model.running():
            pass
        assert model.tree is tree
    assert model.tree is not tree


# --- state ----------------------------------------------------------------------------


class Growing(nn.Module):
    """Keeps something of what is larger than all before, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.way = way
        self.largest = None if way == "a number" else 4.0
        self.has_run = False  # a flag is no state
        if way == "a new tensor":
            self.scale = torch.ones(())
        else:
            self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.has_run = True
        largest = x.abs().max().item()
        if largest > (self.largest or 0.5):
            if self.way == "a buffer in place":
                self.scale *= 4 / largest
            elif self.way == "a number":
                self.largest = largest
            else:
                self.scale = self.scale * 4 / largest
        return self.layer(x) * self.scale * (self.largest or 0.5)


WAYS = ("a buffer in place", "a new tensor", "a number")


def growing(way: str) -> nn.Module:
    return with_lora(Growing(way), "layer")


def two_batches() -> list[tuple[Tensor, Tensor]]:
    """Make two batches of which the second leaves more behind."""
    small, (X, y) = pairs(2)
    return [small, (10 * X, y)]


def state_of(model: nn.Module) -> list:
    """List all buffers, as they are and copied, and all numbers beside them."""
    state = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            state.append((name, id(buffer), copy.deepcopy(buffer).tolist()))
        state += [
            each for each in vars(module).values() if isinstance(each, float | Tensor)
        ]
    return state


# Ours with each way, and each of the host's with one.
@pytest.mark.parametrize(
    ("structure", "way"),
    [*zip(3 * ["lowrank_kron"] + HOSTS_STRUCTURES, 2 * WAYS, strict=True)],
)
def test_no_pass_finds_what_another_one_has_left(way, structure):
    small, large = two_batches()
    la, reversed_la = (
        make(growing(way), structure, **full_rank(structure)) for _ in range(2)
    )
    before = state_of(la.model.model)
    la.fit([small, large])
    reversed_la.fit([large, small])
    assert_close(la.loss, reversed_la.loss)
    first, second = small[0], large[0]
    expected = LogitsModel(copy.deepcopy(la.model.model))(first)
    of_both = [[*each.predictive_moments(second)] for each in (la, reversed_la)]
    assert_close(*of_both)
    assert torch.equal(la.predictive_moments(first).f_mu, expected)
    for pred_type in ("glm", "nn"):
        predict = partial(la, pred_type=pred_type, link_approx="mc")
        of_first = predict(first, generator=generator())
        predict(second)
        assert torch.equal(predict(first, generator=generator()), of_first)
    assert state_of(la.model.model) == before


@pytest.mark.parametrize("way", WAYS)
def test_threads_take_turns_once_one_has_left_something_for_others(way):
    la = make(growing(way))
    # Nothing is known of a model before a pass.
    assert not la.model.tree.is_constant
    la.fit(pairs(2))
    la.amortize(pairs(2))
    assert la.model.tree.is_constant
    model = la.model.model
    before = state_of(model)
    (small, _), (large, _) = two_batches()
    is_within, has_grown = Event(), Event()

    # The small one reads what the large one has left before either is out.
    def wait(_: nn.Module, args: tuple[Tensor]) -> None:
        if torch.equal(args[0], small):
            is_within.set()
            assert has_grown.wait(20)

    model.layer.register_forward_pre_hook(wait)
    model.register_forward_hook(lambda *_: has_grown.set())
    predict = partial(la, pred_type="amortized")
    with ThreadPoolExecutor(2) as pool:
        of_small = pool.submit(predict, small)
        assert is_within.wait(20)
        of_large = pool.submit(predict, large)
    assert not la.model.tree.is_constant
    assert state_of(model) == before
    assert torch.equal(of_small.result(), predict(small))
    assert torch.equal(of_large.result(), predict(large))


def test_an_error_leaves_no_state_behind():
    model = growing("a buffer in place")
    before = state_of(model)
    failing = model.layer.register_forward_hook(lambda *_: 1 / 0)
    with failing, pytest.raises(ZeroDivisionError):
        LogitsModel(model)(two_batches()[1][0])
    assert state_of(model) == before


def test_masks_and_other_large_buffers_are_not_copied_for_each_pass():
    model = nn.Module()
    model.register_buffer("large", torch.zeros(2**16 + 1))
    model.register_buffer("small", torch.zeros(2**16))
    large, small = model.large, model.small
    with put_back(Tree(model)):
        assert model.large is large
        assert model.small is not small
    assert model.small is small


def test_layers_of_four_bits_have_their_own_mode_again():
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    model[0].weight.quant_state = None
    tree = Tree(model)
    tree.four_bit = [model[0]]
    with evaluating(tree, adapter=None):
        assert model[0].training
    assert not model[0].training


# --- checkpoints ----------------------------------------------------------------------


def test_layers_are_computed_anew_give_the_same_numbers_and_stay_as_they_were(batch):
    settings: dict[str, Any] = {"rank": 100, "kfac_approx": "expand"}
    plain = fitted("gpt2", **settings)
    # With dropout in the layers, which stays off.
    model = lora_model("gpt2", lora_dropout=0.5).train()
    run = partial(checkpoint, use_reentrant=True)
    base = model.get_base_model()
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run)
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    # As accelerate's hooks do.
    own = layers[0].forward = layers[0].forward
    calls: list[int] = []
    attention = next(m for m in layers[0].modules() if "Attention" in type(m).__name__)
    attention.register_forward_hook(lambda *_: calls.append(1))
    la = fitted("gpt2", model=model, **settings)
    assert len(calls) > len(ragged_batches())
    assert_close(la.H.to_matrix(), plain.H.to_matrix())
    for link in ("mean_field", "probit"):
        assert_close(la(batch, link_approx=link), plain(batch, link_approx=link))
    assert model.training
    assert [vars(layer).get("forward") for layer in layers] == [own, None]
    # They may be checkpointed after a fit and predictions, too.
    plain.model.model.gradient_checkpointing_enable()
    assert_close(plain(batch, link_approx=link), la(batch, link_approx=link))


def test_checkpoints_find_no_cache_where_use_cache_has_no_name_of_its_own():
    base = built(
        "GraniteMoeForCausalLM",
        num_key_value_heads=1,
        num_local_experts=2,
        experts_implementation="eager",  # others have no float64
    )
    assert "use_cache" not in signature(base.forward).parameters
    model = with_lora(base, "q_proj")
    # Of one's own wrapper nobody knows which options it passes on.
    for wrapped in (model, LastLogits(model)):
        named = {} if wrapped is not model else {"class_token_ids": [3, 5, 7]}
        base.gradient_checkpointing_disable()
        plain = fitted(model=wrapped, **named)
        base.gradient_checkpointing_enable()
        la = fitted(model=wrapped, **named)
        assert_close(la.H.to_matrix(), plain.H.to_matrix())
        assert base.config.use_cache


class LastLogits(nn.Module):
    """A decoder's logits of three tokens behind each text."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"], batch["attention_mask"]).logits
        last = batch["attention_mask"].sum(1) - 1
        return logits[torch.arange(len(last)), last][:, [3, 5, 7]]


class Checkpointing(nn.Module):
    """Checkpoints the middle of three layers in its own code, in training or not."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(5, 4)
        self.within = nn.Linear(4, 4)
        self.after = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).tanh()
        return self.after(checkpoint(self.within, x, use_reentrant=True))


@pytest.mark.parametrize(
    ("structure", "layers"),
    [("lowrank_kron", ("within",)), ("full", ("before", "after"))],
)
def test_reentrant_checkpointing_in_a_models_own_code_is_refused(layers, structure):
    la = make(with_lora(Checkpointing(), *layers), structure)
    # Ours, or torch's own.
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        la.fit(pairs())
    # Without adapted layers before or in it, it does no harm.
    make(with_lora(Checkpointing(), "after")).fit(pairs())


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_compiled_modules_run_eagerly(is_wrapped):
    model, batch = lora_model("bert"), first_batch()
    graphs = []
    keep = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731
    if is_wrapped:
        model = torch.compile(model, backend=keep)
    else:
        model.compile(backend=keep)
    fitted(model=model)(batch)
    assert not graphs
    model(**batch)
    assert graphs
