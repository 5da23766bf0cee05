"""Numbers that are not finite, idle layers, logits without a gradient."""

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from tests.support.cases import assert_exact
from tests.support.dense import full_rank
from tests.support.models import OfMapping, Sorting, TwoLinear, pairs, with_lora
from tests.support.posteriors import count_forward_passes, make


class Broken(TwoLinear):
    """Has finite logits whose derivative, 0 times an infinite slope, is not.

    "hidden" is an activation that the logits do not show, since a `tanh` makes it 1.
    """

    kind = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "hidden":
            # Ten times this is no finite number any more.
            x = 10 * x.masked_fill(torch.arange(5) == 0, 1e308)
        logits = super().forward(x)
        if self.kind == "gradient":
            # The slope of a root at 0 is infinite.
            return logits + (logits * 0).square().sqrt()
        if self.kind in ("nan", "-inf"):
            return logits.masked_fill(torch.arange(3) == 0, float(self.kind))
        return logits


LOGITS = "non-finite logits"


@pytest.mark.parametrize(
    ("structure", "kfac_approx", "kind", "message"),
    [
        ("lowrank_kron", "gradient", "-inf", LOGITS),
        ("lowrank_kron", "gradient", "hidden", "non-fin"),
        ("lowrank_kron", "expand", "gradient", r"second\.lora_B.*non-fin"),
        ("kron", "", "nan", LOGITS),
        ("kron", "", "hidden", "non-fin"),
        ("diag", "", "gradient", r"(second\.lora_B|first\.lora_A).*non-fin"),
    ],
)
def test_what_is_not_finite_is_named_and_does_no_harm(
    structure, kfac_approx, kind, message
):
    model = with_lora(Broken(), "first", "second")
    ((X, y),) = pairs()
    la = make(model, structure, **full_rank(structure, kfac_approx=kfac_approx))

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
    model.kind = kind
    # A single example needs no proof, which has another check.
    for use in (lambda: la(X), lambda: la(X[:1]), lambda: la.fit([(X[:1], y[:1])])):
        with pytest.raises(ValueError, match=message):
            use()


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


@pytest.mark.parametrize(
    ("model", "layers", "structure", "message"),
    [
        # There are no data that would need them.
        (HalfFused(), ["layer"], "lowrank_kron", "2 of 2.*before fusion.$"),
        # Some layers that run are not taken for a matter of data.
        (
            HalfFused(),
            ["layer", "before"],
            "lowrank_kron",
            r"2 of 4 weights.*layer\.lora_A.*before fusion",
        ),
        # As of a layer whose gradients are switched off.
        (
            Sorting(),
            ["used", "unused"],
            "lowrank_kron",
            "used 2 of 4.*unused.*target_modules",
        ),
        (Sorting(False), ["used", "unused"], "full", "No gradient"),
    ],
)
def test_layers_that_have_no_gradient_are_refused(model, layers, structure, message):
    la = make(with_lora(model, *layers), structure)
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
        for part in batch.keys() - {"zeros"}:
            logits = logits + getattr(self, part)(batch[part]).tanh()
        return logits


def batch_of(*parts: str) -> tuple[dict[str, Tensor], Tensor]:
    """Make a batch of four examples that has these parts alone."""
    (X, y), (other, _) = pairs(2)
    inputs = {"texts": X, "images": other}
    # So that there are logits where neither is there.
    return {"zeros": X.new_zeros(4, 3)} | {part: inputs[part] for part in parts}, y


def test_layers_that_a_batch_does_not_call_get_no_curvature_from_it():
    model = OfMapping(with_lora(TextsAndImages(), "texts", "images"))
    parts = [("texts", "images"), ("texts",), (), ("images",)]
    batches = [batch_of(*each) for each in parts]
    la = make(model, **full_rank())
    la.fit(batches)
    assert_exact(la, batches)
    # Logits that no layer has made are in no doubt.
    neither, _ = batch_of()
    assert not la.predictive_moments(neither).f_var.any()
