"""Numbers that are not finite, idle layers, logits without a gradient."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes.checks import inspected
from laplace_lora_ext.passes.recorder import Recorder
from tests.support.dense import assert_exact
from tests.support.models import (
    OfMapping,
    Sorting,
    TwoLinear,
    pairs,
    plain_model,
    with_lora,
)
from tests.support.posteriors import (
    KFAC_APPROX,
    STRUCTURES,
    count_forward_passes,
    make,
)

WAYS = [
    *(
        (
            "lowrank_kron",
            {"backend_kwargs": {"kfac_approx": name}},
        )
        for name in KFAC_APPROX
    ),
    *((structure, {}) for structure in STRUCTURES[1:]),
]


class Broken(nn.Module):
    """Has finite logits whose derivative, 0 times an infinite slope, is not.

    "hidden" is an activation that the logits do not show, since a `tanh` makes it 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLinear()
        self.kind = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "hidden":
            x = x.masked_fill(torch.arange(5) == 0, 1e308) * 10
        logits = self.inner(x.log() if self.kind == "activation" else x)
        if self.kind == "gradient":
            return logits + (logits * 0).square().sqrt()
        return logits * torch.inf if self.kind == "logits" else logits


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("activation", "batch 1: non-finite logits"),
        ("hidden", "batch 1: .*non-finite"),
        ("logits", "batch 1: non-finite logits"),
        (
            "gradient",
            r"batch 1: [wW]eight inner\.(second\.lora_B|first\.lora_A)\S*: non-finite",
        ),
    ],
)
@pytest.mark.parametrize(("structure", "settings"), WAYS)
def test_what_is_not_finite_is_named_and_does_no_harm(
    structure, settings, kind, message
):
    model = with_lora(Broken(), "first", "second")
    X, y = pairs()[0]
    la = make(model, structure, **settings)

    def batches():
        for model.kind in ("", kind):
            yield X, y

    with pytest.raises(ValueError, match=message):
        la.fit(batches())
    model.kind = ""
    la.fit([(X, y)])
    calls = count_forward_passes(la)
    la(X)
    assert len(calls) == 1  # examples are still together
    if structure == "lowrank_kron":
        model.kind = kind
        for use in (
            lambda: la(X),
            lambda: la.fit([(X[:1], y[:1])]),
        ):  # one needs no proof
            with pytest.raises(
                ValueError,
                match=message.removeprefix("batch 1: "),
            ):
                use()


class HalfFused(nn.Module):
    """Reads the LoRA weights of a layer and does not run it, as a fused kernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(5, 5)
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        A = self.layer.lora_A["default"].weight
        B = self.layer.lora_B["default"].weight
        x = self.before(x)
        return self.layer.base_layer(x) + x @ A.T @ B.T


def detached() -> nn.Module:
    model = with_lora(TwoLinear(n_outputs=3), "first", "second")
    model.register_forward_hook(lambda module, args, output: output.detach())
    return model


SILENT = r"batch .*use.* 2 of 4 weights.*layer\.lora_A.*with target_modules"
NO_GRADIENT = "No gradient of the logits reaches the LoRA layers"


def fused_kernel() -> nn.Module:
    return with_lora(HalfFused(), "layer")


def partly_fused() -> nn.Module:
    return with_lora(HalfFused(), "layer", "before")


def without_gradients() -> nn.Module:
    return with_lora(Sorting(with_gradients=False), "used", "unused")


REFUSED = {
    "a fused kernel": (
        fused_kernel,
        r"used 2 of 2 weights.*as it was be",
    ),
    "another one": (partly_fused, SILENT),
    "detached": (detached, NO_GRADIENT),
    "no_grad": (without_gradients, NO_GRADIENT),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_layers_that_have_no_gradient_are_refused(structure, case):
    build, message = REFUSED[case]
    if structure == "kron" and case == "a fused kernel":
        message = "does not use 2 of 2"
    la = make(build(), structure)
    with pytest.raises(RuntimeError, match=message):
        la.fit(pairs() * 3)
    assert la.n_data == 0


class TextsAndImages(nn.Module):
    """Runs the layers of what a batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = nn.Linear(5, 3)
        self.images = nn.Linear(5, 3)

    def forward(self, batch: Mapping) -> torch.Tensor:
        of_parts = [
            getattr(self, part)(x).tanh()
            for part, x in batch.items()
            if part != "zeros"
        ]
        return sum(of_parts, batch["zeros"])


def batch_of(
    *parts: str,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    (X, y), (other, _) = pairs(2)
    inputs = {
        "texts": X,
        "images": other,
        "zeros": torch.zeros(4, 3).double(),
    }
    return {part: inputs[part] for part in (*parts, "zeros")}, y


PARTS = [("texts", "images"), ("texts",), (), ("images",)]


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_layers_that_a_batch_does_not_call_get_no_curvature_from_it(
    structure,
):
    keywords = {"backend_kwargs": {"rank": 100}} if structure == "lowrank_kron" else {}
    model = with_lora(TextsAndImages(), "texts", "images")
    batches = [batch_of(*p) for p in PARTS]
    la = make(model, structure, **keywords)
    la.fit(batches)
    assert_exact(la, OfMapping(model), [X for X, _ in batches])
    nothing, _ = batches[2]  # the batch that calls no layer at all
    assert not la.predictive_moments(nothing).f_var.any()
    la.fit([batch_of("texts")], override=False)
    assert la.n_data == 20


def hooks_of(model: nn.Module) -> list[dict]:
    return [
        dict(hooks)
        for module in model.modules()
        for name, hooks in vars(module).items()
        if "_hooks" in name and isinstance(hooks, dict)
    ]


@pytest.mark.parametrize(
    ("factor", "message"),
    [(1, "somebody else's"), (torch.nan, "non-finite logits")],
)
def test_where_a_pass_of_somebody_else_fails_no_hook_is_left_and_the_reason_named(
    factor, message
):
    """Their code may meet numbers that are not finite before any logits are there."""
    model = LogitsModel(plain_model())
    X, _ = pairs()[0]
    model.register_forward_hook(lambda *_: None)  # a user's own
    X = X * factor
    before = hooks_of(model)
    shapes = []
    recorder = Recorder(model, find_blocks(model.model))

    def passes() -> None:
        model.model.second.register_forward_hook(lambda *_: None)
        if factor == 1:
            model(X)
        raise torch.linalg.LinAlgError("somebody else's")

    with (
        pytest.raises((ValueError, torch.linalg.LinAlgError), match=message),
        inspected(
            recorder,
            X,
            lambda logits: shapes.append(logits.shape),
        ),
    ):
        passes()
    assert hooks_of(model) == before
    assert shapes == ([(4, 3)] if factor == 1 else [])
