"""Adapters of any kind: dense equality, draws, files and refusals."""

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from peft import (
    LoraConfig,
    get_peft_model,
    load_peft_weights,
    set_peft_model_state_dict,
)
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import laplace_lora_ext
from laplace_lora_ext.models.adapters import add_fresh_adapter, own_weights
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.predictive.amortized import amortized_moments, log_variances
from tests.support.dense import (
    batch_logits,
    evidence,
    exact_ggn,
    glm_covariance,
    jacobians,
    labels_of,
    predicted,
    softmax_fisher,
)
from tests.support.matrices import (
    CASES,
    Batch,
    Case,
    dense,
    of_activated,
    of_attention,
    of_convolutions,
    of_convolutions_with_magnitudes,
    of_embedding,
    of_experts,
    of_mixtral,
    of_singular_values,
    of_tokens,
)
from tests.support.models import N_CLASSES, lora_model, ragged_batches
from tests.support.posteriors import count_forward_passes, generator, make
from tests.support.trainers import trainer_of, values

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=CASES)
def case(request) -> Iterator[Case]:
    return CASES[request.param]()


def fitted(case: Case, structure: str = "lowrank_kron", **keywords):
    """Fit a posterior at full rank."""
    if structure == "lowrank_kron":
        keywords["backend_kwargs"] = {"rank": 1000}
    la = make(case.model, structure, **case.keywords, **keywords)
    la.fit(case.batches)
    return la


# --- exactness ------------------------------------------------------------------------


def assert_near(
    found: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float,
) -> None:
    """Compare matrices, relative to the largest entry of all."""
    # Entries near 0 are sums of large ones that cancel.
    largest = expected.abs().max().item()
    assert_close(found, expected, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_curvature_covariances_and_evidence_are_the_dense_ones(case, structure):
    la = fitted(case, structure)
    # Another prior for each block, so that none can be taken for its neighbour.
    prior_precision = torch.linspace(0.3, 2.0, len(la.blocks)).double()
    la.prior_precision = prior_precision
    expected = dense(case)
    assert_close(la.mean, expected.mean, rtol=0, atol=0)
    if structure == "full":
        found = la.H
        H = exact_ggn(expected.jacobian, softmax_fisher(expected.logits))
    else:
        found = la.H.to_matrix()
        H = expected.kronecker()
    assert_near(found, H, case.tolerance)

    sizes = torch.tensor([value.numel() for value in expected.values])
    prior = prior_precision.repeat_interleave(sizes)
    covariance = glm_covariance(expected.jacobian, H, prior)
    f_mu, f_var = predicted(la, case.all_inputs())
    assert_close(f_mu, expected.logits, rtol=case.tolerance, atol=case.tolerance)
    assert_near(f_var, covariance, case.tolerance)

    labels = labels_of(case.batches)
    log_likelihood = -cross_entropy(expected.logits, labels, reduction="sum")
    log_evidence = evidence(H, log_likelihood, expected.mean, prior)
    found = la.log_marginal_likelihood()
    assert_close(found, log_evidence, rtol=case.tolerance, atol=0)


def test_a_batch_of_one_and_a_checkpointed_model_give_the_same():
    case = of_embedding()
    expected = fitted(case).H.to_matrix()
    alone = Case(case.model, ragged_batches(batch_size=1))
    assert_close(fitted(alone).H.to_matrix(), expected)
    case.model.gradient_checkpointing_enable()
    assert_close(fitted(case).H.to_matrix(), expected)


class Centred(nn.Module):
    """Subtracts half of the batch's mean logits: each example counts for others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.model(x)
        return logits - logits.mean(0) / 2


def test_logits_that_depend_on_other_examples_are_back_propagated_through_the_batch():
    case = of_convolutions()
    model = Centred(case.model)
    la = fitted(Case(model, case.batches), "full")
    X = case.all_inputs()[0]
    prior_precision = torch.ones(len(la.H)).double()
    covariance = glm_covariance(jacobians(model, X), la.H, prior_precision)
    found = la.predictive_moments(X).f_var
    assert_close(found, covariance, rtol=1e-9, atol=1e-12)


def test_gradients_in_the_inputs_are_those_of_differences():
    case = of_convolutions()
    la = fitted(case, enable_backprop=True)
    X = case.all_inputs()[1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(la(X)[:, 0].sum(), X)
    direction = torch.randn(X.shape, generator=generator()).double()
    step = 1e-6
    ahead = la(X + step * direction)[:, 0].sum()
    behind = la(X - step * direction)[:, 0].sum()
    slope = (ahead - behind).detach() / (2 * step)
    assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=0)


# --- draws and files ------------------------------------------------------------------


def test_draws_are_adapters(case, tmp_path):
    la = fitted(case)
    la.prior_precision = 50.0
    inputs = case.all_inputs()[0]
    drawn = la.predictive_samples(
        inputs, pred_type="nn", n_samples=2, generator=generator()
    )
    folders = la.sample_adapters(2, tmp_path, generator())
    of_map = la.model(inputs).softmax(-1)
    for of_draw, folder in zip(drawn, folders, strict=True):
        model = copy.deepcopy(case.model)
        set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
        model.double().eval()
        with torch.no_grad():
            of_file = batch_logits(model, inputs).softmax(-1)
        assert_close(of_file, of_draw, rtol=1e-9, atol=1e-12)
        assert (of_file - of_map).abs().max() > 1e-7


def test_a_posterior_survives_a_file(case, tmp_path):
    la = fitted(case)
    la.prior_precision = 50.0
    la.save_pretrained(tmp_path)
    read = laplace_lora_ext.from_pretrained(case.model, tmp_path)
    inputs = case.all_inputs()[0]
    assert torch.equal(read(inputs), la(inputs))
    assert torch.equal(read.log_marginal_likelihood(), la.log_marginal_likelihood())


def test_a_posterior_of_some_experts_leaves_the_others_as_they_are():
    case = of_experts("Mixtral")
    of_second_experts: list[str] = []
    for block in find_blocks(case.model):
        if block.name.endswith("[1]"):
            of_second_experts.append(block.known_as)
    la = fitted(case, weight_names=of_second_experts)
    assert la.n_params == sum(block.values.numel() for block in la.blocks)
    before = {name: weight.detach().clone() for name, weight in case.weights().items()}
    inputs = case.all_inputs()[0]
    la.predictive_samples(inputs, pred_type="nn", n_samples=1)
    for name, weight in case.weights().items():
        assert torch.equal(weight, before[name])


def flags_of(model: nn.Module) -> dict[str, bool]:
    """Tell which parameters require a gradient."""
    return {name: weight.requires_grad for name, weight in model.named_parameters()}


def test_the_model_stays_as_it_was(case):
    before = values(case.model)
    flags = flags_of(case.model)
    la = fitted(case)
    inputs = case.all_inputs()[0]
    la(inputs)
    la.predictive_samples(inputs, pred_type="nn", n_samples=1)
    assert flags_of(case.model) == flags
    assert all(weight.grad is None for weight in case.model.parameters())
    after = case.model.state_dict()
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name


# --- further adapters, and trainings --------------------------------------------------

WITH_TEXTS = [of_mixtral, of_embedding, of_tokens, of_activated]


@pytest.mark.parametrize("build", WITH_TEXTS)
def test_a_second_adapter_has_matrices_of_its_own(build):
    case = build()
    texts = case.all_inputs()
    first = fitted(case)
    of_first = predicted(first, texts)
    add_fresh_adapter(case.model, "second")
    drawn = own_weights(case.model, "second")
    for place, weight in enumerate(drawn.values()):
        noise = torch.randn(weight.shape, generator=generator(place))
        weight.data.copy_(0.3 * noise)
    second = fitted(case)

    # The same weights as the only adapter of a model.
    alone = build()
    for name, weight in own_weights(alone.model, "default").items():
        weight.data.copy_(drawn[name])
    expected = fitted(alone)
    assert_close(second.H.to_matrix(), expected.H.to_matrix())
    assert_close(predicted(second, texts), predicted(expected, texts))
    assert_close(predicted(first, texts), of_first)
    both = laplace_lora_ext.LaplaceMixture([first, second])
    mean = (first(texts[0]) + expected(texts[0])) / 2
    assert_close(both(texts[0]), mean)


def one_by_one(batches: list[Batch]) -> list[Batch]:
    """Take the examples of batches, as a data set has them."""
    examples: list[Batch] = []
    for batch in batches:
        for row in range(len(batch["labels"])):
            examples.append({key: column[row] for key, column in batch.items()})
    return examples


def trainer_for(
    case: Case,
    folder: Path,
    **settings,
):
    """Make a trainer of a case's texts, in float32."""
    return trainer_of(
        folder,
        model=case.model.float(),
        # Three times, so that a fifth to hold out has several texts.
        data=one_by_one(case.batches) * 3,
        save_strategy="no",
        **settings,
    )


@pytest.mark.parametrize("build", [of_mixtral, of_embedding, of_tokens])
def test_stages_train_and_keep_every_matrix(build, tmp_path):
    case = build()
    names_before: list[str] = []
    before: list[torch.Tensor] = []
    for block in find_blocks(case.model):
        names_before.append(block.name)
        # In the trainer's precision: rounding alone must not look like learning.
        before.append(block.weight.detach().float())
    trainer = trainer_for(case, tmp_path)
    la = laplace_lora_ext.train_in_stages(trainer)
    assert [block.name for block in la.blocks] == names_before
    assert la.n_data == len(trainer.train_dataset)
    for block, old in zip(la.blocks, before, strict=True):
        assert not torch.equal(block.weight, old), block.name
    inputs = case.all_inputs()[0]
    read = laplace_lora_ext.from_pretrained(case.model, tmp_path)
    assert torch.equal(read(inputs), la(inputs))


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Compute the mean divergence of probabilities from others `(N, C)`."""
    return (p * (p / q).log()).sum(-1).mean().item()


@torch.no_grad()
def of_active_adapter(
    model: nn.Module,
    inputs: Batch,
) -> torch.Tensor:
    """Compute class probabilities without a posterior."""
    return model.eval()(**inputs).logits.softmax(-1)


def test_learnt_variances_are_near_those_of_every_matrix(case):
    la = fitted(case)
    # A prior so broad that the doubt changes probabilities.
    la.prior_precision = 0.1
    learnt = la.amortize(case.batches, unlabelled=None)
    errors: list[torch.Tensor] = []
    for inputs in case.all_inputs():
        exact = la.predictive_moments(inputs)
        of_learnt = amortized_moments(la, inputs)
        assert_close(of_learnt.f_mu, exact.f_mu)
        error = log_variances(of_learnt.f_var) - log_variances(exact.f_var)
        # One of aLoRA's texts calls for no adapter, so that nothing is in doubt.
        has_doubt = exact.f_var.flatten(1).amax(1) > 0
        errors.append(error[has_doubt])
    # Ridge regression errs less where it has learnt than where an example is left out.
    mean_error = torch.cat(errors).abs().mean()
    assert mean_error < learnt.mean_error + 1e-12
    # Even these are far from what a single logarithm of 0 would make of the mean.
    assert learnt.mean_error < 1.5


def head_of(model: nn.Module) -> nn.Module:
    """Find the layer that PEFT trains beside the adapter."""
    heads: list[nn.Module] = []
    for name, module in model.named_modules():
        if name.endswith("modules_to_save.default"):
            heads.append(module)
    (head,) = heads
    return head


@pytest.mark.parametrize("build", [of_mixtral, of_embedding])
def test_a_student_has_the_doubt_of_every_matrix(build, tmp_path):
    case = build()
    # With the small head of an untrained model, doubt hardly changes probabilities.
    head_of(case.model).weight.data.mul_(8)
    trainer = trainer_for(case, tmp_path, max_steps=300, learning_rate=5e-3)
    la = make(case.model)
    la.fit(case.batches)
    la.prior_precision = 1e-3
    inputs = case.all_inputs()[0]
    targets = la(inputs)
    of_map = divergence(targets, of_active_adapter(case.model, inputs))
    assert of_map > 0.05

    assert la.distill(trainer) == "calibrated"
    case.model.set_adapter("calibrated")
    of_student = divergence(targets, of_active_adapter(case.model, inputs))
    assert of_student < 0.3 * of_map
    learnt = own_weights(case.model, "calibrated")
    for name, weight in own_weights(case.model, "default").items():
        assert not torch.equal(weight, learnt[name]), name


def brightness_told_by_class(n: int) -> list[dict]:
    """Draw images of three classes, each brighter than the last, more or less."""
    labels = torch.arange(n) % N_CLASSES
    brightness = labels[:, None, None, None] - 1.0
    images = torch.randn(n, 3, 16, 16, generator=generator()) + brightness
    return [
        {"pixel_values": image, "labels": label}
        for image, label in zip(images, labels.tolist(), strict=True)
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
    base = transformers.ResNetForImageClassification(config)
    lora = LoraConfig(
        r=2, target_modules=["convolution"], modules_to_save=["classifier"]
    )
    return get_peft_model(base, lora)


def test_convolutions_train_in_stages_and_teach_a_student(tmp_path):
    model = resnet()
    data = brightness_told_by_class(24)
    trainer = trainer_of(
        tmp_path, model=model, data=data, max_steps=30, save_strategy="no"
    )
    la = laplace_lora_ext.train_in_stages(trainer)
    assert la.n_data == len(data)
    assert len(la.blocks) == 2 * 6
    # A held-out fifth is five images: they may choose no doubt at all.
    la.prior_precision = 0.01
    images = [image["pixel_values"] for image in data[:6]]
    batch = {"pixel_values": torch.stack(images)}
    targets = la(batch)
    of_map = divergence(targets, of_active_adapter(model, batch))
    la.amortize(torch.utils.data.DataLoader(data, batch_size=6))
    by_learnt = la(batch, pred_type="amortized")
    assert divergence(targets, by_learnt) < 0.3 * of_map
    model.set_adapter(la.distill(trainer))
    by_student = of_active_adapter(model, batch)
    assert divergence(targets, by_student) < 0.3 * of_map


def test_adalora_has_no_second_adapter():
    with pytest.raises(ValueError, match=r"single AdaLoRA adapter .* hold texts out"):
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
    n_examples = len(labels_of(case.batches))
    assert len(passes) == 2 * (n_examples + len(case.batches))
    messages = [str(warning.message) for warning in caught]
    (ours,) = [message for message in messages if "no linear layer" in message]
    assert "2 of 6 matrices, such as base_model" in ours
    assert "a forward pass and 2 backward passes of its own" in ours  # of three classes


def test_linear_layers_alone_run_in_batches():
    case = of_embedding()
    la = make(case.model, target_modules=["query"])
    passes = count_forward_passes(la)
    la.fit(case.batches)
    assert len(passes) == len(case.batches)


def test_experts_that_no_text_reaches_have_no_curvature():
    case = of_experts("Qwen3Moe")
    batch = case.batches[0]
    one = {key: batch[key][:1, :1] for key in ("input_ids", "attention_mask")}
    one["labels"] = batch["labels"][:1]
    la = fitted(Case(case.model, [one]))
    n_without = 0
    for block, of_block in zip(la.blocks, la.H_facs.blocks, strict=True):
        if ".experts." in block.name and of_block.normalizer == 0:
            n_without += 1
    # A token takes two of three experts in each of two layers; each has two matrices,
    # of A and B.
    assert n_without == 2 * 1 * 2 * 2
    assert torch.isfinite(la(one)).all()


# --- which take part ------------------------------------------------------------------


def names(
    model: nn.Module,
    **selection,
) -> list[str]:
    """Name the blocks without what they have in common."""
    found = [block.known_as for block in find_blocks(model, **selection)]
    return [name.removeprefix("base_model.model.") for name in found]


def test_names_of_experts():
    model = of_experts("Mixtral").model
    found = names(model, layers_to_transform=0)
    assert "model.layers.0.mlp.experts.gate_up_proj.lora_A.weight[2]" in found
    assert "model.layers.0.mlp.experts.down_proj.lora_B.weight[0]" in found
    # A and B of q_proj, and of two parameters of each of three experts.
    assert len(set(found)) == len(found) == 2 + 2 * 2 * 3


def test_names_of_an_embedding_and_of_tokens():
    embeddings = "bert.embeddings.word_embeddings."
    found = names(of_embedding().model, target_modules=["word_embeddings"])
    assert found == [
        f"{embeddings}lora_embedding_A",
        f"{embeddings}lora_embedding_B",
    ]
    (tokens,) = names(of_tokens().model, target_modules=["word_embeddings"])
    assert tokens.startswith(embeddings)
    assert tokens.endswith("trainable_tokens_delta")


def test_names_of_attention():
    found = names(of_attention().model, target_modules=["attention"])
    assert sorted(found) == [
        "attention.lora_A.weight",
        "attention.lora_B.weight",
        "attention.out_proj.lora_A.weight",
        "attention.out_proj.lora_B.weight",
    ]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("experts", {"gate_up_proj", "down_proj"}),
        ("gate_up_proj", {"gate_up_proj"}),
        ("experts.gate_up_proj", {"gate_up_proj"}),
    ],
)
def test_experts_are_selected_by_their_module_or_their_parameter(name, parameters):
    found = names(of_experts("Mixtral").model, target_modules=[name])
    assert {each.split(".")[-3] for each in found} == parameters
    # In two layers, A and B of three experts.
    assert len(found) == 2 * 2 * 3 * len(parameters)


def test_magnitudes_take_part_where_asked_for():
    case = of_convolutions_with_magnitudes()
    assert not any("magnitude" in name for name in names(case.model))
    wanted = [block.known_as for block in find_blocks(case.model)]
    for layer in ("first", "second", "last"):
        wanted.append(f"base_model.model.{layer}.lora_magnitude_vector.weight")
    # No name of a weight has a hyphen: none is left out.
    with_magnitudes = Case(case.model, case.batches, but="-")
    la = fitted(with_magnitudes, weight_names=wanted)
    expected = dense(with_magnitudes).kronecker()
    assert_close(la.H.to_matrix(), expected, rtol=1e-9, atol=1e-12)


# --- refused --------------------------------------------------------------------------


def test_what_needs_rows_is_refused_by_name():
    case = of_embedding()
    with pytest.raises(
        NotImplementedError, match=r"kfac_approx='expand'.*lora_embedding_A.*Use"
    ):
        make(case.model, backend_kwargs={"kfac_approx": "expand"})
    with pytest.raises(
        NotImplementedError, match=r"backends see.*lora_embedding_A.*leave these"
    ):
        make(case.model, "kron")
    make(case.model, "kron", target_modules=["query"])


def test_weights_that_processes_share_among_them_are_refused():
    model = lora_model("bert", target_modules=["word_embeddings"])
    model.base_model.model.bert.embeddings.word_embeddings.tp_layer = nn.Identity()
    with pytest.raises(
        NotImplementedError, match=r"word_embeddings \(Embedding\).*target_modules"
    ):
        find_blocks(model)
