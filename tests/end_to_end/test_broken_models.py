"""Numbers that are not finite, idle layers, logits without a gradient."""

import copy
from collections.abc import Iterator, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.support.cases import assert_exact
from tests.support.dense import full_rank
from tests.support.models import (
    OfMapping,
    Sorting,
    TwoLinear,
    pairs,
    plain_model,
    with_lora,
)
from tests.support.posteriors import count_forward_passes, make


class Broken(nn.Module):
    """Has finite logits whose derivative, 0 times an infinite slope, is not.

    "hidden" is an activation that the logits do not show, since a `tanh` makes it 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLinear()
        self.kind = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "hidden":
            # Ten times this is no finite number any more.
            x = 10 * x.masked_fill(torch.arange(5) == 0, 1e308)
        if self.kind == "activation":
            x = x.log()
        logits = self.inner(x)
        if self.kind == "gradient":
            # The slope of a root at 0 is infinite.
            return logits + (logits * 0).square().sqrt()
        if self.kind == "logits":
            return logits * torch.inf
        return logits


EXPAND = {"backend_kwargs": {"kfac_approx": "expand"}}
# The layers that come after.
GRADIENT_OF = r"inner\.(second\.lora_B|first\.lora_A)"


@pytest.mark.parametrize(
    ("structure", "settings", "kind", "culprit"),
    [
        ("lowrank_kron", {}, "activation", "logits"),
        ("lowrank_kron", {}, "hidden", ""),
        ("lowrank_kron", {}, "logits", "logits"),
        ("lowrank_kron", {}, "gradient", GRADIENT_OF),
        ("lowrank_kron", EXPAND, "hidden", ""),
        ("lowrank_kron", EXPAND, "gradient", GRADIENT_OF),
        ("kron", {}, "logits", "logits"),
        ("kron", {}, "hidden", ""),
        ("kron", {}, "gradient", GRADIENT_OF),
        ("diag", {}, "gradient", GRADIENT_OF),
        ("full", {}, "hidden", ""),
    ],
)
def test_what_is_not_finite_is_named_and_does_no_harm(
    structure, settings, kind, culprit
):
    message = (
        rf"non-finite {culprit}" if culprit == "logits" else rf"{culprit}.*non-fin"
    )
    model = with_lora(Broken(), "first", "second")
    ((X, y),) = pairs()
    la = make(model, structure, **settings)

    def breaking_at_the_second_batch() -> Iterator[tuple[Tensor, Tensor]]:
        yield X, y
        model.kind = kind
        yield X, y

    with pytest.raises(ValueError, match=f"batch 1: .*{message}"):
        la.fit(breaking_at_the_second_batch())
    model.kind = ""
    la.fit([(X, y)])
    calls = count_forward_passes(la)
    la(X)
    # A failed pass proves nothing of the layout: examples are still together.
    assert len(calls) == 1
    if structure == "lowrank_kron":
        model.kind = kind
        with pytest.raises(ValueError, match=message):
            la(X)
        # A single example needs no proof, which has another check.
        with pytest.raises(ValueError, match=message):
            la(X[:1])
        with pytest.raises(ValueError, match=message):
            la.fit([(X[:1], y[:1])])


# --- layers that are not called, or bring no gradient ---------------------------------


class HalfFused(nn.Module):
    """Reads the LoRA weights of a layer and does not run it, as a fused kernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(5, 5)
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        A = self.layer.lora_A["default"].weight
        B = self.layer.lora_B["default"].weight
        x = self.before(x)
        return self.layer.base_layer(x) + x @ A.T @ B.T


def detached() -> nn.Module:
    model = plain_model()
    model.register_forward_hook(lambda module, args, output: output.detach())
    return model


def partly_fused() -> nn.Module:
    return with_lora(HalfFused(), "layer", "before")


REFUSED = {
    "a fused kernel": (partial(with_lora, HalfFused(), "layer"), "2 of 2"),
    "another one": (partly_fused, r"2 of 4 weights.*layer\.lora_A"),
    "detached": (detached, "No gradient"),
    "no_grad": (
        partial(with_lora, Sorting(with_gradients=False), "used", "unused"),
        "No gradient",
    ),
}


def test_some_fused_layers_are_not_taken_for_a_matter_of_data():
    with pytest.raises(RuntimeError, match="before fusion"):
        make(partly_fused()).fit(pairs())


@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_have_no_gradient_are_refused(structure, case):
    build, message = REFUSED[case]
    la = make(copy.deepcopy(build()), structure)
    with pytest.raises(RuntimeError, match=message):
        la.fit(pairs() * 3)
    assert la.n_data == 0


class TextsAndImages(nn.Module):
    """Runs the layers of what a batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = nn.Linear(5, 3)
        self.images = nn.Linear(5, 3)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = batch["zeros"]
        for part in ("texts", "images"):
            if part in batch:
                logits = logits + getattr(self, part)(batch[part]).tanh()
        return logits


def batch_of(*parts: str) -> tuple[dict[str, Tensor], Tensor]:
    """Make a batch of four examples that has these parts alone."""
    (X, y), (other, _) = pairs(2)
    inputs = {"texts": X, "images": other}
    # So that there are logits where neither is there.
    return {"zeros": X.new_zeros(4, 3)} | {part: inputs[part] for part in parts}, y


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_layers_that_a_batch_does_not_call_get_no_curvature_from_it(structure):
    model = with_lora(TextsAndImages(), "texts", "images")
    parts = [("texts", "images"), ("texts",), (), ("images",)]
    batches = [batch_of(*each) for each in parts]
    la = make(model, structure, **full_rank(structure))
    la.fit(batches)
    assert_exact(la, OfMapping(model), [X for X, _ in batches])
    # Logits that no layer has made are in no doubt.
    neither, _ = batch_of()
    assert not la.predictive_moments(neither).f_var.any()
    la.fit([batch_of("texts")], override=False)
    assert la.n_data == 4 * (len(batches) + 1)
