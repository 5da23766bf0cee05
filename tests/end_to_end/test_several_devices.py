"""A model whose layers are on several devices predicts and tunes as on one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.backend_registration as registration
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn
from torch.testing import assert_close

from tests.end_to_end.pretended_device import NAME, install
from tests.support.dense import EXACT
from tests.support.models import lora_model, pairs, ragged_batches, with_lora
from tests.support.posteriors import fitted, generator, make
from tests.support.ranks import on_ranks
from tests.support.texts import fitted_text, text_batches

pytestmark = pytest.mark.skipif(
    not hasattr(registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch knows no devices made of Python",
)

# The pretended accelerators compute on the CPU, but refuse tensors of other devices.
CPU = "cpu"
FIRST = f"{NAME}:0"
SECOND = f"{NAME}:1"
ALL_LAYERS = ("first", "second", "third")
SOME_LAYERS = ("second", "third")

Outcomes = dict[str, Tensor]


def on_accelerators(job: Callable[[], Outcomes]) -> tuple[set[str], Outcomes]:
    """Run a job in a process of its own; return devices and outcomes.

    PyTorch knows the pretended accelerators from then on.
    """

    def alone(_: int) -> tuple[set[str], Outcomes]:
        dist.destroy_process_group()
        install()
        found = job()
        places = {str(value.device) for value in found.values()}
        return places, {name: value.detach().cpu() for name, value in found.items()}

    (result,) = on_ranks(alone, 1)
    assert not isinstance(result, Exception), result
    return result


class Layers(nn.Module):
    """Each layer but the first takes its inputs to where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for layer in (self.second, self.third):
            place = next(layer.parameters()).device
            x = layer(x.to(place)).tanh()
        # By tanh alone, no two logits would differ by more than 2.
        return 3 * x


def move(model: nn.Module, places: Sequence[str]) -> None:
    """Move each layer to its place."""
    for layer, place in zip(model.children(), places, strict=True):
        layer.to(place)


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
        "mc": la(X, generator=generator(), **by_draws),
        "nn": la(X, pred_type="nn", generator=generator(), **by_draws),
        "decision": la.predict(X).probabilities,
        "draws": la.sample(3, generator()),
        "evidence": la.log_marginal_likelihood(layerwise),
    }


def outcomes(targets: Sequence[str], structure: str, places: Sequence[str]) -> Outcomes:
    """Fit, predict, choose the prior precision, restore a state and fit more data."""
    model = with_lora(Layers(), *targets)
    move(model, places)
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


@pytest.mark.parametrize(
    ("targets", "structure"),
    [
        (ALL_LAYERS, "lowrank_kron"),
        # No LoRA weight is where batches go.
        (SOME_LAYERS, "lowrank_kron"),
        (SOME_LAYERS, "full"),
    ],
)
def test_everything_is_as_on_one_device(targets, structure):
    of_places = partial(outcomes, targets, structure)
    _, found = on_accelerators(lambda: of_places((CPU, FIRST, SECOND)))
    assert_close(found, of_places((CPU, CPU, CPU)), **EXACT)


def test_a_posterior_follows_layers_to_several_devices():
    ((X, _),) = pairs()

    def after_a_fit(places: Sequence[str]) -> Outcomes:
        # The first layer, where batches go, has no LoRA weight: it stays behind.
        model = with_lora(Layers(), *SOME_LAYERS)
        move(model, (places[0],) * 3)
        la = make(model)
        la.fit(pairs(2))
        move(model, places)
        return predictions(la, X)

    devices, found = on_accelerators(lambda: after_a_fit((FIRST, SECOND, SECOND)))
    assert devices == {FIRST}
    assert_close(found, after_a_fit((CPU, CPU, CPU)), **EXACT)


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


def of_texts(model: nn.Module) -> Outcomes:
    la = fitted_text(model)
    score = la.score(text_batches()[0], n_samples=2, generator=generator())
    return {"evidence": la.log_marginal_likelihood(), "scores": score.log_prob}


def of_answers(model: nn.Module) -> Outcomes:
    la = fitted("gpt2", model=model)
    probit = la(ragged_batches()[0])
    return {"evidence": la.log_marginal_likelihood(), "probit": probit}


@pytest.mark.parametrize("of_model", [of_texts, of_answers])
def test_language_models_are_as_on_one_device(of_model):
    devices, found = on_accelerators(lambda: of_model(dispatched()))
    assert_close(found, of_model(lora_model("gpt2")), **EXACT)
    # Where batches go in, though the logits are made elsewhere.
    assert devices == {CPU}
