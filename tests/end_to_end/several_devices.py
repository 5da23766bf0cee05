"""A model whose layers are on several devices; `test_several_devices` runs this.

It takes a process of its own: PyTorch knows the pretended accelerator from then on.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn
from torch.testing import assert_close

from tests.end_to_end.pretended_device import NAME, install
from tests.support.dense import EXACT
from tests.support.models import (
    CLASS_TOKEN_IDS,
    lora_model,
    pairs,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import generator, make
from tests.support.texts import text_batches

# The pretended accelerators compute on the CPU, but refuse tensors of other devices.
CPU = "cpu"
FIRST = f"{NAME}:0"
SECOND = f"{NAME}:1"
ALL_LAYERS = ("first", "second", "third")
SOME_LAYERS = ("second", "third")

Outcomes = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def _accelerators() -> None:
    install()


class Layers(nn.Module):
    """Each layer gets its inputs where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            place = next(layer.parameters()).device
            x = layer(x.to(place)).tanh()
        # By tanh alone, no two logits would differ by more than 2.
        return 3 * x


def spread(places: Sequence[str], targets: Sequence[str]) -> nn.Module:
    """Make a model with LoRA in some of its layers, each of which is at a place."""
    model = with_lora(Layers(), *targets)
    return moved(model, places)


def moved(model: nn.Module, places: Sequence[str]) -> nn.Module:
    """Move each layer to its place."""
    for layer, place in zip(model.children(), places, strict=True):
        layer.to(place)
    return model


def assert_equal(found: Outcomes, expected: Outcomes) -> None:
    """Compare outcomes wherever they are with those on the CPU."""
    assert found.keys() == expected.keys()
    for name in found:
        # What torch says of the difference, behind the outcome's name.
        describe = f"{name}: {{}}".format
        assert_close(found[name].cpu(), expected[name], msg=describe, **EXACT)


# --- classifiers ----------------------------------------------------------------------


def predictions(la: Any, X: Tensor) -> Outcomes:
    """Ask all that posteriors of every structure can say about a batch."""
    moments = la.predictive_moments(X)
    _, joint_covariance = la.predictive_moments(X, joint=True)
    # Numbers are drawn on the CPU, wherever they go: the draws are the same.
    by_draws = {"link_approx": "mc", "n_samples": 3}
    layerwise = torch.ones(la.n_layers).to(la.mean)
    return {
        "mean": moments.f_mu,
        "covariance": moments.f_var,
        "joint": joint_covariance,
        "probit": la(X),
        "mean field": la(X, link_approx="mean_field"),
        "mc": la(X, generator=generator(), **by_draws),
        "nn": la(X, pred_type="nn", generator=generator(), **by_draws),
        "decision": la.predict(X).probabilities,
        "draws": la.sample(3, generator()),
        "evidence": la.log_marginal_likelihood(),
        "evidences": la.log_marginal_likelihood(layerwise),
    }


def outcomes(model: nn.Module, structure: str) -> Outcomes:
    """Fit, predict, choose the prior precision, restore a state and fit more data."""
    loader = pairs(2)
    X, _ = loader[0]
    la = make(model, structure)
    la.fit(loader)
    found = {"loss": la.loss} | predictions(la, X)
    # Both steps are taken, however little they change.
    la.optimize_prior_precision(method="marglik", n_steps=2, tolerance=0)
    found["by evidence"] = la.prior_precision
    la.optimize_prior_precision(method="gridsearch", val_loader=loader, grid_size=3)
    found["by search"] = la.prior_precision
    restored = make(model, structure)
    restored.load_state_dict(la.state_dict())
    found["restored"] = restored(X)
    la.fit(loader, override=False)
    found["more data"] = la(X)
    if structure == "lowrank_kron":
        statistics = la.predictive_statistics(pairs(2))
        found["statistics"] = statistics.moments(la.prior_precision).f_var
        # One example with two outputs, as Jacobians are shaped.
        rows = torch.ones(1, 2, la.n_params).to(la.mean)
        found["form"] = la.posterior_precision.inv_square_form(rows)
    return found


@cache
def outcomes_on_cpu(structure: str, targets: Sequence[str]) -> Outcomes:
    """Compute once what several cases are compared with."""
    model = spread((CPU, CPU, CPU), targets)
    return outcomes(model, structure)


@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
@pytest.mark.parametrize(
    ("targets", "places"),
    [
        pytest.param(ALL_LAYERS, (CPU, FIRST, SECOND), id="one after the other"),
        pytest.param(ALL_LAYERS, (SECOND, CPU, SECOND), id="there and back"),
        # No LoRA weight is where batches go.
        pytest.param(SOME_LAYERS, (CPU, FIRST, SECOND), id="some layers"),
    ],
)
def test_everything_is_as_on_one_device(targets, places, structure):
    found = outcomes(spread(places, targets), structure)
    assert_equal(found, outcomes_on_cpu(structure, targets))


# Without "kron": curvlinops would need a generator of the pretended device.
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_a_posterior_follows_layers_to_several_devices(structure):
    # The first layer, where batches go, has no LoRA weight: it stays behind.
    model = spread((FIRST, FIRST, FIRST), SOME_LAYERS)
    la = make(model, structure)
    la.fit(pairs(2))
    ((X, _),) = pairs()
    expected = {name: value.cpu() for name, value in predictions(la, X).items()}
    moved(model, (FIRST, SECOND, SECOND))
    found = predictions(la, X)
    for name, value in found.items():
        assert str(value.device) == FIRST, name
    assert_equal(found, expected)


# --- language models ------------------------------------------------------------------


def dispatched() -> nn.Module:
    """Make a language model with Accelerate's hooks, half of it elsewhere."""
    model = lora_model("gpt2")
    base = model.get_base_model().to(CPU)
    transformer = base.transformer
    head = base.lm_head
    # Tied to the embedding otherwise, which would move with it.
    head.weight = nn.Parameter(head.weight.detach().clone())
    for module in (transformer.h[1], transformer.ln_f, head):
        module.to(FIRST)
        # The cache of each layer is where that layer is.
        hook = AlignDevicesHook(FIRST, skip_keys=["past_key_values"])
        add_hook_to_module(module, hook)
    return model


def outcomes_of_texts(model: nn.Module) -> Outcomes:
    """Fit texts, and score one batch by draws of the weights."""
    la = make(model, likelihood="language_modeling")
    batches = text_batches()
    la.fit(batches)
    score = la.score(batches[0], n_samples=2, generator=generator())
    return {
        "evidence": la.log_marginal_likelihood(),
        "log-probabilities": score.log_prob,
    }


def test_texts_are_as_on_one_device():
    found = outcomes_of_texts(dispatched())
    # Where batches go in, though the logits are made elsewhere.
    assert {value.device.type for value in found.values()} == {CPU}
    assert_equal(found, outcomes_of_texts(lora_model("gpt2")))


def outcomes_of_answers(model: nn.Module) -> Outcomes:
    batches = ragged_batches()
    la = make(model, class_token_ids=CLASS_TOKEN_IDS)
    la.fit(batches)
    return {"evidence": la.log_marginal_likelihood(), "probit": la(batches[0])}


@pytest.mark.parametrize("has_output_layer", [True, False])
def test_answers_are_as_on_one_device(has_output_layer, monkeypatch):
    on_two_devices = dispatched()
    on_one = lora_model("gpt2")
    if not has_output_layer:
        # The class tokens' rows can't be taken apart then: all logits are computed.
        kind = type(on_one.get_base_model())
        monkeypatch.setattr(kind, "get_output_embeddings", lambda _: None)
    found = outcomes_of_answers(on_two_devices)
    assert_equal(found, outcomes_of_answers(on_one))
