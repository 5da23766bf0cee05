"""No pass finds what another one has left; layers that training checkpoints are so."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch
from peft import helpers
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from laplace_lora_ext.models.logits_model import LogitsModel
from tests.support.dense import EXACT, full_rank
from tests.support.models import (
    built,
    first_batch,
    lora_model,
    pairs,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import (
    KFAC_APPROX,
    fitted,
    generator,
    make,
    with_structures,
)

# --- state ----------------------------------------------------------------------------


def dynamic() -> nn.Module:
    """Make a classifier whose positions depend on the longest text that it has read."""
    base = built(
        "LlamaForSequenceClassification",
        max_position_embeddings=4,
        rope_scaling={"rope_type": "dynamic", "factor": 8.0},
    )
    return with_lora(base, "q_proj", "v_proj").float().eval()


class Growing(nn.Module):
    """Keeps something of what is larger than all before, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.way = way
        self.largest = 4.0
        self.scale = 1.0
        if way == "a number":
            self.largest = 0.5
        elif way == "a tensor":
            self.scale = torch.ones(3)
        else:
            del self.scale
            self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().max().item()
        if largest > self.largest:
            if self.way == "a buffer in place":
                self.scale *= 4 / largest
            elif self.way == "a number":
                self.largest = largest
            else:
                self.scale = self.scale * 4 / largest
        return self.layer(x) * self.scale * self.largest


WAYS = ("a buffer in place", "a new buffer", "a tensor", "a number")
CASES = ("dynamic positions", *WAYS)


def model_of(case: str) -> nn.Module:
    return with_lora(Growing(case), "layer") if case in WAYS else dynamic()


def two_batches(case: str) -> list:
    """Make two batches of which the second leaves more behind."""
    if case not in WAYS:
        return [first_batch(lengths=[n] * 3, padded_to=n, seed=n) for n in (6, 30)]
    small, (X, y) = pairs(2)
    return [small, (10 * X, y)]


def state_of(model: nn.Module) -> list:
    """List all buffers, as they are and copied, and all numbers beside them."""
    state = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            state.append((name, id(buffer), copy.deepcopy(buffer).tolist()))
        numbers = vars(module).items()
        state += [(name, each) for name, each in numbers if isinstance(each, float)]
    return state


@pytest.mark.parametrize(("structure", "case"), with_structures(CASES))
def test_no_pass_finds_what_another_one_has_left(case, structure):
    small, large = two_batches(case)
    la, reversed_la = (
        make(model_of(case), structure, **full_rank(structure)) for _ in range(2)
    )
    before = state_of(la.model.model)
    la.fit([small, large])
    assert not la.model.tree.is_constant
    reversed_la.fit([large, small])
    assert_close(la.loss, reversed_la.loss)
    P, Q = la.posterior_precision, reversed_la.posterior_precision
    if not isinstance(P, Tensor):
        P, Q = P.to_matrix(), Q.to_matrix()
    assert_close(P, Q, rtol=1e-3, atol=1e-4)

    first, second = (la.model.split(each)[0] for each in (small, large))
    expected = LogitsModel(copy.deepcopy(la.model.model).eval())(first)
    la.predictive_moments(second)
    assert torch.equal(la.predictive_moments(first).f_mu, expected)
    for pred_type in ("glm", "nn"):
        predict = partial(la, pred_type=pred_type, link_approx="mc")
        of_first = predict(first, generator=generator())
        predict(second)
        assert torch.equal(predict(first, generator=generator()), of_first)
    assert state_of(la.model.model) == before


@pytest.mark.parametrize("way", ["a buffer in place", "a tensor"])
def test_threads_take_turns_once_one_has_left_something_for_others(way):
    batches = pairs(2)
    small, large = batches[0][0], 10 * batches[1][0]
    la = make(with_lora(Growing(way), "layer"))
    # Nothing is known of a model before a pass.
    assert not la.model.tree.is_constant
    la.fit(batches)
    la.amortize(batches)
    assert la.model.tree.is_constant
    model = la.model.model
    before = state_of(model)
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
    model = model_of("a buffer in place")
    before = state_of(model)
    failing = model.layer.register_forward_hook(lambda *_: 1 / 0)
    with failing, pytest.raises(ZeroDivisionError):
        LogitsModel(model)(10 * pairs()[0][0])
    assert state_of(model) == before


@pytest.mark.skipif(
    not hasattr(helpers, "DoraCaching"), reason="this PEFT caches nothing"
)
def test_draws_of_weights_neither_read_nor_fill_the_caches_of_dora():
    (batch,) = ragged_batches(batch_size=8)
    la = fitted(model=lora_model("bert", use_dora=True), batches=[batch])
    model = la.model.model.eval()

    def predicted() -> list[Tensor]:
        drawn = la(batch, pred_type="nn", n_samples=3, generator=generator())
        return [la.predictive_moments(batch).f_var, drawn]

    expected = predicted()
    with torch.no_grad(), helpers.DoraCaching():
        own = model(**batch).logits
        assert_close(predicted(), expected)
        assert_close(model(**batch).logits, own)
        # A fit finds all of the layers' calls, too.
        la.fit([batch])
        assert_close(predicted()[0], expected[0])


# --- checkpoints ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "use_reentrant", "kfac_approx"),
    [
        ("bert", False, "gradient"),
        ("gpt2", True, "gradient"),
        ("gpt_neox", False, "expand"),
    ],
)
def test_layers_are_computed_anew_give_the_same_numbers_and_stay_as_they_were(
    kind, use_reentrant, kfac_approx
):
    settings: dict[str, Any] = {"rank": 100, "kfac_approx": kfac_approx}
    plain = fitted(kind, model=lora_model(kind), **settings)
    # With dropout in the layers, which stays off.
    model = lora_model(kind, lora_dropout=0.5).train()
    run = partial(checkpoint, use_reentrant=use_reentrant)
    base = model.get_base_model()
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run)
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    calls: list[int] = []
    attention = next(m for m in layers[0].modules() if "Attention" in type(m).__name__)
    attention.register_forward_hook(lambda *_: calls.append(1))
    la = fitted(kind, model=model, **settings)
    assert len(calls) > len(ragged_batches())
    assert_close(la.H.to_matrix(), plain.H.to_matrix())
    batch = first_batch()
    for link in ("mean_field", "probit"):
        assert_close(la(batch, link_approx=link), plain(batch, link_approx=link))
    assert model.training
    assert not any("forward" in vars(layer) for layer in layers)


def test_layers_may_be_checkpointed_after_a_fit():
    la = fitted("bert")
    expected = la(first_batch(), link_approx="mean_field")
    la.model.model.gradient_checkpointing_enable()
    assert_close(la(first_batch(), link_approx="mean_field"), expected)


class Checkpointing(nn.Module):
    """Checkpoints the middle of three layers in its own code, in training or not."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        # None does not checkpoint.
        self.use_reentrant = use_reentrant
        self.before = nn.Linear(5, 4)
        self.within = nn.Linear(4, 4)
        self.after = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).tanh()
        if self.use_reentrant is None:
            return self.after(self._middle(x))
        x = checkpoint(self._middle, x, use_reentrant=self.use_reentrant)
        return self.after(x)

    def _middle(self, x: Tensor) -> Tensor:
        # Its inputs aren't those of the checkpoint.
        return self.within(x.sin()).tanh()


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_a_model_that_checkpoints_in_its_own_code_gives_the_same_numbers(kfac_approx):
    X = pairs()[0][0].requires_grad_()
    results = []
    for use_reentrant in (None, False):
        model = with_lora(Checkpointing(use_reentrant), "before", "within", "after")
        la = make(model, **full_rank(kfac_approx=kfac_approx))
        la.fit(pairs(2))
        Js, _ = la.backend.jacobians(X, enable_backprop=True)
        (slope,) = torch.autograd.grad(Js.square().sum(), X)
        covariances = la.predictive_moments(X.detach()).f_var
        results.append([la.H.to_matrix(), covariances, slope])
    assert_close(*results, **EXACT)


@pytest.mark.parametrize(
    ("structure", "layers"),
    [
        ("lowrank_kron", ("before", "within", "after")),
        ("lowrank_kron", ("within",)),
        ("full", ("before", "after")),
    ],
)
def test_reentrant_checkpointing_in_a_models_own_code_is_refused(layers, structure):
    la = make(with_lora(Checkpointing(use_reentrant=True), *layers), structure)
    # Ours, or torch's own.
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        la.fit(pairs())
    # No half of a fit is left.
    assert la.n_data == 0
    # Without adapted layers before or in it, it does no harm.
    make(with_lora(Checkpointing(use_reentrant=True), "after")).fit(pairs())
