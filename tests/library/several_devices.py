"""A model whose layers are on several devices; `test_several_devices` runs this.

It takes a process of its own: PyTorch knows the pretended accelerator from then on.
"""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from laplace.curvature import AsdlGGN
from torch import nn
from torch.testing import assert_close

from tests.library.pretended_device import NAME, install
from tests.support.dense import EXACT
from tests.support.models import CLASS_TOKEN_IDS, lora_model, pairs, ragged_batches, with_lora
from tests.support.posteriors import generator, make

CPU = "cpu"
FIRST = f"{NAME}:0"
SECOND = f"{NAME}:1"
ALL = ("first", "second", "third")
PLACES = {
    "one after the other": (ALL, (CPU, FIRST, SECOND)),
    "there and back": (ALL, (SECOND, CPU, SECOND)),
    "no LoRA weight where batches go": (("second", "third"), (CPU, FIRST, SECOND)),
}


@pytest.fixture(scope="module", autouse=True)
def accelerators():
    install()


class Layers(nn.Module):
    """Each layer gets its inputs where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x.to(next(layer.parameters()).device)).tanh()
        return 3 * x


def spread(places: Sequence[str] = (CPU, CPU, CPU), targets: Sequence[str] = ALL) -> nn.Module:
    return moved(with_lora(Layers(), *targets), places)


def moved(model: nn.Module, places: Sequence[str]) -> nn.Module:
    for layer, place in zip(model.children(), places, strict=True):
        layer.to(place)
    return model


def predictions(la, X) -> dict[str, torch.Tensor]:
    """What all structures can say about a batch."""
    drawn = {"link_approx": "mc", "n_samples": 3}
    statistics = la.predictive_moments(X)
    return {
        "mean": statistics.f_mu,
        "covariance": statistics.f_var,
        "joint": la.predictive_moments(X, joint=True)[1],
        "probit": la(X),
        "mean field": la(X, link_approx="mean_field"),
        "mc": la(X, **drawn, generator=generator()),
        "nn": la(X, pred_type="nn", **drawn, generator=generator()),
        "decision": la.predict(X).probabilities,
        "draws": la.sample(3, generator()),
        "evidence": la.log_marginal_likelihood(),
        "evidences": la.log_marginal_likelihood(torch.ones(la.n_layers).to(la.mean)),
    }


CHOICES = {
    "marglik": {"n_steps": 2, "tolerance": 0},
    "agreement": {"train_loader": pairs(2)},
    "gridsearch": {"val_loader": pairs(2), "grid_size": 3},
}


def outcomes(model: nn.Module, structure: str) -> dict[str, torch.Tensor]:
    la = make(model, structure)
    loader = pairs(2)
    la.fit(loader)
    found = {"loss": la.loss} | predictions(la, loader[0][0])
    for method, options in CHOICES.items():
        la.optimize_prior_precision(method=method, **options)
        found[f"prior of {method}"] = la.prior_precision
    restored = make(model, structure)
    restored.load_state_dict(la.state_dict())
    found["restored"] = restored(loader[0][0])
    la.fit(loader, override=False)
    found["more data"] = la(loader[0][0])
    if structure == "lowrank_kron":
        moments = la.predictive_statistics(loader).moments(la.prior_precision)
        precision = la.posterior_precision
        rows = torch.ones(1, 2, la.n_params).to(la.mean)
        found |= {"statistics": moments.f_var, "diagonal": precision.diag()}
        found["form"] = precision.inv_square_form(rows)
    return found


@cache
def outcomes_on_cpu(structure: str, targets: Sequence[str]) -> dict[str, torch.Tensor]:
    return outcomes(spread(targets=targets), structure)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        describe = f"{name}: {{}}".format
        assert_close(found[name].cpu(), expected[name], msg=describe, **EXACT)


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
@pytest.mark.parametrize("order", PLACES)
def test_everything_is_as_on_one_device(order, structure):
    targets, places = PLACES[order]
    found = outcomes(spread(places, targets), structure)
    assert_equal(found, outcomes_on_cpu(structure, targets))


@pytest.mark.parametrize("structure", ["lowrank_kron", "kron", "diag", "full"])
def test_a_posterior_follows_layers_to_several_devices(structure):
    model = spread((FIRST, FIRST, FIRST), ("second", "third"))
    # curvlinops would need a generator of the pretended device.
    la = make(model, structure, **{"backend": AsdlGGN} if structure == "kron" else {})
    la.fit(pairs(2))
    X = pairs()[0][0]
    expected = {name: value.cpu() for name, value in predictions(la, X).items()}
    moved(model, (FIRST, SECOND, SECOND))
    found = predictions(la, X)
    assert {str(value.device) for value in found.values()} == {FIRST}
    assert_equal(found, expected)


def dispatched(first: str, second: str) -> nn.Module:
    """A language model with Accelerate's hooks, the second half of which is elsewhere."""
    model = lora_model("gpt2")
    base = model.get_base_model().to(first)
    base.lm_head.weight = nn.Parameter(base.lm_head.weight.detach().clone())  # tied otherwise
    for module in (base.transformer.h[1], base.transformer.ln_f, base.lm_head):
        hook = AlignDevicesHook(second, skip_keys=["past_key_values"])
        add_hook_to_module(module.to(second), hook)
    return model


def texts(model: nn.Module) -> dict[str, torch.Tensor]:
    la = make(model, likelihood="language_modeling")
    batches = [
        batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}
        for batch in ragged_batches()
    ]
    la.fit(batches)
    prompt = ragged_batches(padding_side="left")[0] | {"max_new_tokens": 3, "do_sample": False}
    del prompt["labels"]
    options = {"n_samples": 2, "generator": generator()}
    score = la.score(batches[0], **options)
    return {
        "evidence": la.log_marginal_likelihood(),
        "log-probabilities": score.log_prob,
        "texts": la.generate(**options, **prompt).sequences,
    }


def test_texts_are_as_on_one_device():
    found = texts(dispatched(CPU, FIRST))
    assert {value.device.type for value in found.values()} == {CPU}
    assert_equal(found, texts(lora_model("gpt2")))


@pytest.mark.parametrize("has_output_layer", [True, False])
def test_answers_are_as_on_one_device(has_output_layer, monkeypatch):
    batches = ragged_batches()

    def found(model: nn.Module) -> dict[str, torch.Tensor]:
        if not has_output_layer:
            monkeypatch.setattr(
                type(model.get_base_model()), "get_output_embeddings", lambda _: None
            )
        la = make(model, class_token_ids=CLASS_TOKEN_IDS)
        la.fit(batches)
        return {"evidence": la.log_marginal_likelihood(), "probit": la(batches[0])}

    assert_equal(found(dispatched(CPU, FIRST)), found(lora_model("gpt2")))
