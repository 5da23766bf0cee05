"""Numbers that are not finite, idle layers, logits without a gradient."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from tests.support.dense import assert_exact, full_rank
from tests.support.models import (
    OfMapping,
    Sorting,
    TwoLinear,
    pairs,
    plain_model,
    with_lora,
)
from tests.support.posteriors import (
    count_forward_passes,
    make,
    with_structures,
)


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
            is_first = torch.arange(5) == 0
            x = 10 * x.masked_fill(is_first, 1e308)
        if self.kind == "activation":
            x = x.log()
        logits = self.inner(x)
        if self.kind == "gradient":
            zeros = logits * 0
            # The slope of a root at 0 is infinite.
            return logits + zeros.square().sqrt()
        if self.kind == "logits":
            return logits * torch.inf
        return logits


OF_GRADIENT = r"[wW]eight inner\.(second\.lora_B|first\.lora_A)\S*: non-finite"


@pytest.mark.parametrize(
    ("structure", "kfac_approx", "kind", "message"),
    [
        ("lowrank_kron", "gradient", "activation", "non-finite logits"),
        ("lowrank_kron", "gradient", "hidden", ".*non-finite"),
        ("lowrank_kron", "gradient", "logits", "non-finite logits"),
        ("lowrank_kron", "gradient", "gradient", OF_GRADIENT),
        ("lowrank_kron", "expand", "hidden", ".*non-finite"),
        ("lowrank_kron", "expand", "gradient", OF_GRADIENT),
        ("kron", None, "logits", "non-finite logits"),
        ("kron", None, "hidden", ".*non-finite"),
        ("kron", None, "gradient", OF_GRADIENT),
        ("diag", None, "gradient", OF_GRADIENT),
        ("full", None, "hidden", ".*non-finite"),
        ("full", None, "gradient", OF_GRADIENT),
    ],
)
def test_what_is_not_finite_is_named_and_does_no_harm(
    structure, kfac_approx, kind, message
):
    model = with_lora(Broken(), "first", "second")
    ((X, y),) = pairs()
    settings = {}
    if kfac_approx:
        settings["backend_kwargs"] = {"kfac_approx": kfac_approx}
    la = make(model, structure, **settings)
    batch = (X, y)

    def breaking_at_the_second_batch() -> Iterator[tuple[Tensor, Tensor]]:
        yield batch
        model.kind = kind
        yield batch

    with pytest.raises(ValueError, match=f"batch 1: {message}"):
        la.fit(breaking_at_the_second_batch())
    model.kind = ""
    la.fit([batch])
    calls = count_forward_passes(la)
    la(X)
    # A failed pass proves nothing of the layout: examples are still together.
    assert len(calls) == 1
    if structure == "lowrank_kron":
        model.kind = kind
        with pytest.raises(ValueError, match=message):
            la(X)
        # A single example needs no proof, which has another check.
        alone = (X[:1], y[:1])
        with pytest.raises(ValueError, match=message):
            la.fit([alone])


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
        of_base = self.layer.base_layer(x)
        return of_base + x @ A.T @ B.T


def detaching(module, args, output: Tensor) -> Tensor:
    return output.detach()


def detached() -> nn.Module:
    model = plain_model()
    model.register_forward_hook(detaching)
    return model


def fused_kernel() -> nn.Module:
    return with_lora(HalfFused(), "layer")


def partly_fused() -> nn.Module:
    return with_lora(HalfFused(), "layer", "before")


def without_gradients() -> nn.Module:
    model = Sorting(with_gradients=False)
    return with_lora(model, "used", "unused")


@dataclass(frozen=True)
class Refused:
    """A model, and what is said of it."""

    build: Callable[[], nn.Module]
    message: str


NO_GRADIENT = "No gradient of the logits reaches the LoRA layers"
REFUSED = {
    "a fused kernel": Refused(fused_kernel, r"used 2 of 2 weights.*as it was be"),
    "another one": Refused(
        partly_fused,
        r"batch .*use.* 2 of 4 weights.*layer\.lora_A.*with target_modules",
    ),
    "detached": Refused(detached, NO_GRADIENT),
    "no_grad": Refused(without_gradients, NO_GRADIENT),
}


def test_some_fused_layers_are_not_taken_for_a_matter_of_data():
    la = make(partly_fused())
    with pytest.raises(RuntimeError, match="as it was before fusion"):
        la.fit(pairs())


@pytest.mark.parametrize(("structure", "case"), with_structures(REFUSED))
def test_layers_that_have_no_gradient_are_refused(structure, case):
    refused = REFUSED[case]
    message = refused.message
    # Curvlinops needs all layers in every batch.
    if structure == "kron" and case == "a fused kernel":
        message = "does not use 2 of 2"
    la = make(refused.build(), structure)
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
        if "texts" in batch:
            of_texts = self.texts(batch["texts"])
            logits = logits + of_texts.tanh()
        if "images" in batch:
            of_images = self.images(batch["images"])
            logits = logits + of_images.tanh()
        return logits


def batch_of(
    *parts: str,
) -> tuple[dict[str, Tensor], Tensor]:
    """Make a batch of four examples that has these parts alone."""
    (X, y), (other, _) = pairs(2)
    inputs = {"texts": X, "images": other}
    # So that there are logits where neither is there.
    batch = {"zeros": X.new_zeros(4, 3)}
    for part in parts:
        batch[part] = inputs[part]
    return batch, y


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_layers_that_a_batch_does_not_call_get_no_curvature_from_it(structure):
    model = with_lora(TextsAndImages(), "texts", "images")
    batches = [
        batch_of("texts", "images"),
        batch_of("texts"),
        batch_of(),
        batch_of("images"),
    ]
    settings = full_rank(structure)
    la = make(model, structure, **settings)
    la.fit(batches)
    inputs = [X for X, _ in batches]
    assert_exact(la, OfMapping(model), inputs)
    # Logits that no layer has made are in no doubt.
    neither, _ = batch_of()
    moments = la.predictive_moments(neither)
    assert not moments.f_var.any()
    one_more = batch_of("texts")
    la.fit([one_more], override=False)
    n_batches = len(batches) + 1
    assert la.n_data == 4 * n_batches
