"""Weights of any kind: further adapters, trainings, costs, names, refusals."""

import warnings
from functools import partial

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch.testing import assert_close
from torch.utils.data import DataLoader

import laplace_lora_ext
from laplace_lora_ext.models.adapters import add_fresh_adapter, own_weights
from laplace_lora_ext.models.lora_layers import find_blocks
from tests.support.cases import Case, dense
from tests.support.dense import (
    EXACT,
    curvature_of,
    full_rank,
    glm_covariance,
    jacobians,
    labels_of,
    predicted,
)
from tests.support.matrices import (
    of_activated,
    of_convolutions,
    of_embedding,
    of_experts,
    of_singular_values,
    of_tokens,
)
from tests.support.models import N_CLASSES, ragged_batches
from tests.support.posteriors import count_forward_passes, make, normal
from tests.support.snapshots import Snapshot
from tests.support.trainers import trainer_of

assert_exact = partial(assert_close, **EXACT)
# Most of these models are warned of, since their examples take passes of their own.
pytestmark = pytest.mark.filterwarnings("ignore")


# --- exactness ------------------------------------------------------------------------


class Centred(nn.Module):
    """Subtracts half of the batch's mean logits: each example counts for others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits = self.model(x)
        return logits - logits.mean(0) / 2


def test_logits_that_depend_on_other_examples_are_back_propagated_through_the_batch():
    case = of_convolutions()
    model = Centred(case.model)
    la = Case(model, case.batches).fitted("full")
    X, *_ = case.all_inputs()
    # The prior precision is 1 as long as none is chosen.
    prior = torch.ones_like(la.mean)
    covariance = glm_covariance(jacobians(model, X), la.H, prior)
    assert_exact(la.predictive_moments(X).f_var, covariance)


def test_gradients_in_the_inputs_are_those_of_differences():
    case = of_convolutions()
    la = case.fitted(enable_backprop=True)
    _, X = case.all_inputs()
    inputs = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(la(inputs)[:, 0].sum(), inputs)
    # The square of the step and rounding over it are both far below the tolerance.
    step = 1e-6 * normal(*X.shape)
    with torch.no_grad():
        difference = (la(X + step) - la(X - step))[:, 0].sum() / 2
    assert_close((gradient * step).sum(), difference, rtol=1e-6, atol=0)


# --- further adapters, and trainings --------------------------------------------------


def draw_second_adapter(model: nn.Module) -> dict[str, Tensor]:
    """Add an adapter named "second" that is not 0; return its weights."""
    add_fresh_adapter(model, "second")
    weights = own_weights(model, "second")
    for place, weight in enumerate(weights.values()):
        # A seed for each weight, so that none is drawn alike.
        weight.data.copy_(0.3 * normal(*weight.shape, seed=place))
    return weights


MIXTRAL = partial(of_experts, "Mixtral")


@pytest.mark.parametrize("build", [MIXTRAL, of_embedding, of_tokens, of_activated])
def test_a_second_adapter_has_matrices_of_its_own(build):
    case = build()
    texts = case.all_inputs()
    first = case.fitted()
    of_first = predicted(first, texts)
    drawn = draw_second_adapter(case.model)
    second = case.fitted()

    # The same weights as the only adapter of a model.
    other = build()
    for name, weight in own_weights(other.model, "default").items():
        weight.data.copy_(drawn[name])
    alone = other.fitted()
    assert_close(curvature_of(second), curvature_of(alone))
    assert_close(predicted(second, texts), predicted(alone, texts))
    # The first posterior still predicts by its own adapter.
    assert_close(predicted(first, texts), of_first)


def brightness_told_by_class(n: int) -> list[dict]:
    """Draw images of three classes, each brighter than the last, more or less."""
    images = normal(n, 3, 16, 16).float()
    labels = [place % N_CLASSES for place in range(n)]
    return [
        {"pixel_values": image + label - 1, "labels": label}
        for image, label in zip(images, labels, strict=True)
    ]


def resnet() -> nn.Module:
    """Adapt all convolutions of a classifier of images, in float32."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=N_CLASSES,
    )
    lora = LoraConfig(
        r=2, target_modules=["convolution"], modules_to_save=["classifier"]
    )
    return get_peft_model(transformers.ResNetForImageClassification(config), lora)


def test_convolutions_train_in_stages_and_teach_a_student(tmp_path):
    model = resnet()
    data = brightness_told_by_class(24)
    settings = {"max_steps": 30, "save_strategy": "no"}
    trainer = trainer_of(tmp_path, model=model, data=data, **settings)
    la = laplace_lora_ext.train_in_stages(trainer)
    assert la.n_data == len(data)
    n_convolutions = 6
    assert len(la.blocks) == 2 * n_convolutions
    # A held-out fifth is five images: they may choose no doubt at all.
    la.prior_precision = 0.01
    batch = {"pixel_values": torch.stack([each["pixel_values"] for each in data[:6]])}
    targets = la(batch)

    def divergence_of(p: Tensor) -> float:
        return kl_div(p.log(), targets, reduction="batchmean").item()

    @torch.no_grad()
    def of_active_adapter() -> float:
        return divergence_of(model.eval()(**batch).logits.softmax(-1))

    of_map = of_active_adapter()
    la.amortize(DataLoader(data, batch_size=6))
    assert divergence_of(la(batch, pred_type="amortized")) < 0.3 * of_map
    model.set_adapter(la.distill(trainer))
    assert of_active_adapter() < 0.3 * of_map


def test_adalora_has_no_second_adapter():
    with pytest.raises(ValueError, match="single AdaLoRA adapter"):
        add_fresh_adapter(of_singular_values().model, "second")


# --- what they cost -------------------------------------------------------------------


def test_each_example_takes_a_pass_of_its_own_which_is_said_once():
    case = of_embedding()
    la = make(case.model)
    passes = count_forward_passes(la)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la.fit(case.batches)
        la.fit(case.batches)
    # A batch is looked at as a whole before its examples are, one at a time; the last
    # one has a single example.
    n_of_a_fit = 2 + len(labels_of(case.batches))
    assert len(passes) == 2 * n_of_a_fit
    messages = [str(warning.message) for warning in caught]
    # Of two fits, one.
    (message,) = [message for message in messages if "no linear layer" in message]
    assert "2 of 6 matrices, such as base_model" in message
    # Of three classes, two contrasts.
    assert "a forward pass and 2 backward passes of its own" in message


def test_linear_layers_alone_run_in_batches():
    case = of_embedding()
    la = make(case.model, target_modules=["query"])
    passes = count_forward_passes(la)
    la.fit(case.batches)
    assert len(passes) == len(case.batches)


def test_experts_that_no_text_reaches_have_no_curvature():
    case = of_experts("Qwen3Moe")
    (one_token,) = ragged_batches(lengths=[1], padded_to=1)
    la = Case(case.model, [one_token]).fitted()
    n_without = 0
    for block, sums in zip(la.blocks, la.H_facs, strict=True):
        n_without += ".experts." in block.name and sums.normalizer == 0
    # In two layers the token takes two of three experts; each has A and B of both
    # parameters that are adapted.
    assert n_without == 2 * 1 * (2 * 2)
    assert la(one_token).isfinite().all()


# --- which take part ------------------------------------------------------------------


def names(case: Case, **selection) -> list[str]:
    """Name the blocks without what they have in common."""
    blocks = find_blocks(case.model, **selection)
    return [block.known_as.removeprefix("base_model.model.") for block in blocks]


def test_names_of_an_embedding_and_of_tokens():
    embeddings = "bert.embeddings.word_embeddings"
    selection = {"target_modules": ["word_embeddings"]}
    assert names(of_embedding(), **selection) == [
        f"{embeddings}.lora_embedding_A",
        f"{embeddings}.lora_embedding_B",
    ]
    (tokens,) = names(of_tokens(), **selection)
    assert tokens.startswith(embeddings)
    assert tokens.endswith("trainable_tokens_delta")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("experts", {"gate_up_proj", "down_proj"}),
        ("gate_up_proj", {"gate_up_proj"}),
        ("experts.gate_up_proj", {"gate_up_proj"}),
    ],
)
def test_experts_are_selected_by_their_module_or_their_parameter(name, parameters):
    found = names(MIXTRAL(), target_modules=[name])
    # A name ends with the parameter, the matrix, and the expert's weight.
    assert {each.split(".")[-3] for each in found} == parameters
    # In two layers, A and B of three experts.
    assert len(set(found)) == len(found) == 2 * 2 * 3 * len(parameters)
    assert "model.layers.0.mlp.experts.gate_up_proj.lora_A.weight[2]" in found


def test_a_posterior_of_some_experts_leaves_the_others_as_they_are():
    case = MIXTRAL()
    wanted = [
        block.known_as for block in find_blocks(case.model) if block.name[-3:] == "[1]"
    ]
    la = case.fitted(weight_names=wanted)
    assert la.n_params == sum(block.values.numel() for block in la.blocks)
    before = Snapshot(case.model)
    la.predictive_samples(case.inputs(case.batches[0]), pred_type="nn", n_samples=1)
    before.assert_equal(case.model, random_state=False)


def test_magnitudes_take_part_where_asked_for():
    case = of_convolutions(use_dora=True)
    wanted = [block.known_as for block in find_blocks(case.model)]
    assert not any("magnitude" in name for name in wanted)
    for layer in ("first", "second", "last"):
        wanted.append(f"base_model.model.{layer}.lora_magnitude_vector.weight")
    # No name of a weight has a hyphen: none is left out.
    with_magnitudes = Case(case.model, case.batches, but="-")
    la = with_magnitudes.fitted(weight_names=wanted)
    expected = dense(with_magnitudes)
    assert_exact(curvature_of(la), expected.curvature("lowrank_kron"))


# --- refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "settings"),
    [("lowrank_kron", full_rank(kfac_approx="expand")), ("kron", {})],
)
def test_statistics_of_rows_are_refused_where_there_are_none(structure, settings):
    model = of_embedding().model
    with pytest.raises(NotImplementedError, match="lora_embedding_A"):
        make(model, structure, **settings)
    make(model, structure, target_modules=["query"], **settings)
