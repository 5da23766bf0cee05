"""No pass finds what another one has left in the model."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event

import pytest
import torch
from peft import helpers
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForSequenceClassification

from laplace_lora_ext.models.logits_model import LogitsModel
from tests.support.dense import full_rank
from tests.support.models import (
    N_CLASSES,
    VOCABULARY,
    lora_model,
    pairs,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import fitted, generator, make, with_structures

SHORT, LONG = 6, 30


def dynamic() -> nn.Module:
    """Make a classifier whose positions depend on the longest text that it has read."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=4,
        rope_scaling={"rope_type": "dynamic", "factor": 8.0},
        num_labels=N_CLASSES,
        pad_token_id=0,
    )
    base = LlamaForSequenceClassification(config)
    return with_lora(base, "q_proj", "v_proj").float().eval()


def texts(length: int) -> dict[str, Tensor]:
    (batch,) = ragged_batches([length] * 4, 4, padded_to=length, seed=length)
    return batch


class Keeping(nn.Module):
    """Keeps something of each pass, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.way = way
        if way != "an attribute":
            self.register_buffer("seen", torch.ones(()))
        self.longest = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "an attribute":
            self.longest = max(self.longest, x.abs().max().item())
            return self.layer(x) * self.longest
        if self.way == "a new buffer":
            self.seen = self.seen + 1
        else:
            self.seen.mul_(0.5).add_(x.mean())
        return self.layer(x) * self.seen.clone()


def keeping(way: str) -> nn.Module:
    return with_lora(Keeping(way), "layer")


class Growing(nn.Module):
    """Keeps a table beside its layers that grows with what is longer than it."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("scale", torch.ones(()))
        self.in_place = in_place
        self.longest = 4.0
        self.table = torch.full((3,), 0.25)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > self.longest:
            if self.in_place:
                self.scale *= 4 / x.abs().max()
            else:
                self.longest = x.abs().max().item()
                self.table = torch.full((3,), 1 / self.longest)
        return self.layer(x) * self.table * self.scale


MODELS = {
    "dynamic positions": dynamic,
    "a buffer in place": partial(keeping, "a buffer in place"),
    "a new buffer": partial(keeping, "a new buffer"),
    "an attribute": partial(keeping, "an attribute"),
    "a table that grows": lambda: with_lora(Growing(), "layer"),
}


def two_batches(case: str) -> list:
    """Make two batches of which the second leaves more behind."""
    if case == "dynamic positions":
        return [texts(SHORT), texts(LONG)]
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


@pytest.mark.parametrize(("structure", "case"), with_structures(MODELS))
def test_the_order_of_batches_changes_no_curvature(case, structure):
    batches = two_batches(case)
    model = MODELS[case]()
    before = state_of(model)
    forward = make(model, structure, **full_rank(structure))
    forward.fit(batches)
    assert state_of(model) == before
    backward = make(MODELS[case](), structure, **full_rank(structure))
    backward.fit(batches[::-1])
    assert_close(forward.loss, backward.loss)
    P, Q = forward.posterior_precision, backward.posterior_precision
    if not isinstance(P, Tensor):
        P, Q = P.to_matrix(), Q.to_matrix()
    assert_close(P, Q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", MODELS)
def test_a_prediction_is_the_same_behind_another_one(case):
    batch, other = two_batches(case)
    la = make(MODELS[case]())
    la.fit([batch])
    first, second = (la.model.split(each)[0] for each in (batch, other))
    before = state_of(la.model.model)
    expected = LogitsModel(copy.deepcopy(la.model.model).eval())(first)
    for x in (first, second, first):
        found = la.predictive_moments(x).f_mu
    assert_close(found, expected, rtol=0, atol=0)
    for pred_type in ("glm", "nn"):
        of_first = la(first, pred_type, link_approx="mc", generator=generator())
        la(second, pred_type, link_approx="mc")
        again = la(first, pred_type, link_approx="mc", generator=generator())
        assert_close(again, of_first, rtol=0, atol=0)
    assert state_of(la.model.model) == before


@pytest.mark.parametrize("in_place", [False, True])
def test_threads_take_turns_once_one_has_left_something_for_others(in_place):
    batches = pairs(2)
    small, large = batches[0][0], 10 * batches[1][0]
    la = make(with_lora(Growing(in_place), "layer"))
    # Nothing is known of a model before a pass.
    assert not la.model.tree.is_constant
    la.fit(batches)
    la.amortize(batches)
    assert la.model.tree.is_constant
    model = next(m for m in la.model.modules() if isinstance(m, Growing))
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


# --- caches of the adapter's own layers -----------------------------------------------


@pytest.mark.skipif(
    not hasattr(helpers, "DoraCaching"), reason="this PEFT caches nothing"
)
def test_draws_of_weights_neither_read_nor_fill_the_caches_of_dora():
    (batch,) = ragged_batches(batch_size=8)
    la = fitted(model=lora_model("bert", use_dora=True), batches=[batch])
    inputs = {key: value for key, value in batch.items() if key != "labels"}

    def predicted() -> list[Tensor]:
        drawn = la(batch, pred_type="nn", n_samples=3, generator=generator())
        return [la.predictive_moments(batch).f_var, drawn]

    expected = predicted()
    model = la.model.model.eval()
    with torch.no_grad():
        own = model(**inputs).logits
        with helpers.DoraCaching():
            assert_close(model(**inputs).logits, own)
            for found, right in zip(predicted(), expected, strict=True):
                assert_close(found, right)
            assert_close(model(**inputs).logits, own)
            # A fit finds all of the layers' calls, too.
            la.fit([batch])
            assert_close(predicted()[0], expected[0])
        assert_close(model(**inputs).logits, own)


def test_an_error_leaves_no_state_behind():
    model = keeping("a buffer in place")
    before = state_of(model)
    failing = model.layer.register_forward_hook(lambda *_: 1 / 0)
    with failing, pytest.raises(ZeroDivisionError):
        LogitsModel(model)(pairs()[0][0])
    assert state_of(model) == before
