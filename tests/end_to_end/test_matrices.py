"""Adapters of any kind: dense equality, draws, files and refusals."""

import copy
import warnings
from functools import partial
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
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.testing import assert_close
from torch.utils.data import DataLoader

import laplace_lora_ext
from laplace_lora_ext.models.adapters import add_fresh_adapter, own_weights
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.predictive.amortized import log_variances
from laplace_lora_ext.predictive.posterior import amortized_moments
from tests.support.dense import (
    EXACT,
    batch_logits,
    curvature_of,
    evidence,
    exact_ggn,
    full_rank,
    glm_covariance,
    jacobians,
    labels_of,
    predicted,
    softmax_fisher,
)
from tests.support.heads import HEADS
from tests.support.labels import bernoulli_fisher, several_labels
from tests.support.matrices import (
    CASES,
    Batch,
    Case,
    dense,
    of_activated,
    of_convolutions,
    of_convolutions_with_magnitudes,
    of_embedding,
    of_experts,
    of_mixtral,
    of_singular_values,
    of_tokens,
)
from tests.support.models import (
    N_CLASSES,
    head_of,
    lora_model,
    one_by_one,
    ragged_batches,
)
from tests.support.posteriors import (
    count_forward_passes,
    generator,
    make,
    normal,
    priors_of_blocks,
)
from tests.support.trainers import trainer_of, values

assert_exact = partial(assert_close, **EXACT)
# Most of these models are warned of, since their examples take passes of their own.
pytestmark = pytest.mark.filterwarnings("ignore")


ADAPTERS = CASES | HEADS


@pytest.fixture(params=ADAPTERS)
def case(request) -> Case:
    return ADAPTERS[request.param]()


def fitted(
    case: Case,
    structure: str = "lowrank_kron",
    **keywords,
):
    """Fit a posterior with an exact Fisher, at full rank."""
    settings = full_rank(structure, stochastic=False) | case.keywords | keywords
    la = make(case.model, structure, case.likelihood, **settings)
    la.fit(case.batches)
    return la


def first_inputs(case: Case) -> Batch:
    """Take the first batch without its labels."""
    return case.inputs(case.batches[0])


# --- exactness ------------------------------------------------------------------------


def assert_near(
    found: Tensor,
    expected: Tensor,
    tolerance: float,
) -> None:
    """Compare matrices, relative to the largest entry of all."""
    # Entries near 0 are sums of large ones that cancel.
    largest = expected.abs().max().item()
    atol = tolerance * largest
    assert_close(found, expected, rtol=0, atol=atol)


def of_labels(n_labels: int) -> Case:
    """Make a classifier of several labels, or of one."""
    batches = ragged_batches()
    for number, batch in enumerate(batches):
        # Rolled, since each batch is given the same labels.
        batch["labels"] = several_labels(batch, n_labels).roll(number, 0)
    return Case(
        lora_model("bert", n_labels=n_labels),
        batches,
        likelihood="multi_label_classification",
        fisher=bernoulli_fisher,
        loss=partial(binary_cross_entropy_with_logits, reduction="sum"),
    )


TASKS = {
    "one label": partial(of_labels, 1),
    "several labels": partial(of_labels, 3),
}


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
@pytest.mark.parametrize("name", [*ADAPTERS, *TASKS])
def test_curvature_covariances_and_evidence_are_the_dense_ones(name, structure):
    build = (ADAPTERS | TASKS)[name]
    case = build()
    la = fitted(case, structure)
    prior_precision = priors_of_blocks(la)
    la.prior_precision = prior_precision
    expected = dense(case)
    assert torch.equal(la.mean, expected.mean)
    fisher = case.fisher(expected.logits)
    if structure == "lowrank_kron":
        H = expected.kronecker(fisher)
    else:
        H = exact_ggn(expected.jacobian, fisher)
    if structure == "diag":
        H = H.diagonal().diag()
    tolerance = case.tolerance
    found = curvature_of(la)
    assert_near(found, H, tolerance)

    n_weights = [value.numel() for value in expected.values]
    repeats = torch.tensor(n_weights)
    prior = prior_precision.repeat_interleave(repeats)
    covariance = glm_covariance(expected.jacobian, H, prior)
    inputs = case.all_inputs()
    f_mu, f_var = predicted(la, inputs)
    assert_close(f_mu, expected.logits, rtol=tolerance, atol=tolerance)
    assert_near(f_var, covariance, tolerance)

    labels = labels_of(case.batches)
    loss = case.loss(expected.logits, labels)
    assert_close(la.loss, loss, rtol=tolerance, atol=0)
    log_evidence = evidence(H, -loss, expected.mean, prior)
    found = la.log_marginal_likelihood()
    assert_close(found, log_evidence, rtol=tolerance, atol=0)


def test_batches_of_one_give_the_same():
    case = of_embedding()
    one_at_a_time = ragged_batches(batch_size=1)
    batches_of_one = Case(case.model, one_at_a_time)
    found = curvature_of(fitted(batches_of_one))
    expected = curvature_of(fitted(case))
    assert_close(found, expected)


def test_a_checkpointed_model_gives_the_same():
    case = of_embedding()
    expected = curvature_of(fitted(case))
    case.model.gradient_checkpointing_enable()
    found = curvature_of(fitted(case))
    assert_close(found, expected)


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
    la = fitted(Case(model, case.batches), "full")
    X = first_inputs(case)
    Js = jacobians(model, X)
    # The prior precision is 1 as long as none is chosen.
    prior = torch.ones_like(la.mean)
    covariance = glm_covariance(Js, la.H, prior)
    found = la.predictive_moments(X)
    assert_exact(found.f_var, covariance)


def test_gradients_in_the_inputs_are_those_of_differences():
    case = of_convolutions()
    la = fitted(case, enable_backprop=True)
    _, X = case.all_inputs()

    def of_first_class(X: Tensor) -> Tensor:
        p = la(X)
        return p[:, 0].sum()

    inputs = X.clone().requires_grad_()
    p = of_first_class(inputs)
    (gradient,) = torch.autograd.grad(p, inputs)
    direction = normal(*X.shape)
    found = (gradient * direction).sum()
    # The square of the step and rounding over it are both far below the tolerance.
    step = 1e-6
    with torch.no_grad():
        ahead = of_first_class(X + step * direction)
        behind = of_first_class(X - step * direction)
    slope = (ahead - behind) / (2 * step)
    assert_close(found, slope, rtol=1e-6, atol=0)


# --- draws and files ------------------------------------------------------------------


def with_adapter_of(
    folder: Path,
    model: nn.Module,
) -> nn.Module:
    """Copy a model, with an adapter's weights from a file."""
    copied = copy.deepcopy(model)
    weights = load_peft_weights(str(folder), device="cpu")
    set_peft_model_state_dict(copied, weights)
    return copied.double().eval()


def test_draws_are_adapters(case, tmp_path):
    la = fitted(case)
    la.prior_precision = 50.0
    inputs = first_inputs(case)
    drawn = la.predictive_samples(
        inputs,
        pred_type="nn",
        n_samples=2,
        generator=generator(),
    )
    of_map = la.model(inputs).softmax(-1)
    folders = la.sample_adapters(2, tmp_path, generator())
    for of_draw, folder in zip(drawn, folders, strict=True):
        model = with_adapter_of(folder, case.model)
        with torch.no_grad():
            logits = batch_logits(model, inputs)
        of_file = logits.softmax(-1)
        assert_exact(of_file, of_draw)
        # A draw that was the mean would agree with its file, too.
        distance = (of_file - of_map).abs()
        assert distance.max() > 1e-7


def test_a_posterior_survives_a_file(case, tmp_path):
    la = fitted(case)
    la.prior_precision = 50.0
    la.save_pretrained(tmp_path)
    read = laplace_lora_ext.from_pretrained(case.model, tmp_path)
    inputs = first_inputs(case)
    found = read(inputs)
    assert torch.equal(found, la(inputs))
    found = read.log_marginal_likelihood()
    expected = la.log_marginal_likelihood()
    assert torch.equal(found, expected)


def test_a_posterior_of_some_experts_leaves_the_others_as_they_are():
    case = of_experts("Mixtral")
    of_second_experts: list[str] = []
    for block in find_blocks(case.model):
        if block.name.endswith("[1]"):
            of_second_experts.append(block.known_as)
    la = fitted(case, weight_names=of_second_experts)
    n_weights = [block.values.numel() for block in la.blocks]
    assert la.n_params == sum(n_weights)
    before = values(case.model)
    inputs = first_inputs(case)
    la.predictive_samples(inputs, pred_type="nn", n_samples=1)
    after = values(case.model)
    for name, weight in after.items():
        assert torch.equal(weight, before[name]), name


def flags_of(model: nn.Module) -> dict[str, bool]:
    """Tell which parameters require a gradient."""
    flags = {}
    for name, weight in model.named_parameters():
        flags[name] = weight.requires_grad
    return flags


def test_the_model_stays_as_it_was(case):
    before = values(case.model)
    flags = flags_of(case.model)
    la = fitted(case)
    inputs = first_inputs(case)
    la(inputs)
    la.predictive_samples(inputs, pred_type="nn", n_samples=1)
    assert flags_of(case.model) == flags
    for name, weight in case.model.named_parameters():
        assert weight.grad is None, name
    after = values(case.model)
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name


# --- further adapters, and trainings --------------------------------------------------


def draw_second_adapter(model: nn.Module) -> dict[str, Tensor]:
    """Add an adapter named "second" that is not 0; return its weights."""
    add_fresh_adapter(model, "second")
    weights = own_weights(model, "second")
    for place, weight in enumerate(weights.values()):
        # A seed for each weight, so that none is drawn alike.
        draws = generator(seed=place)
        noise = torch.randn(weight.shape, generator=draws)
        weight.data.copy_(0.3 * noise)
    return weights


@pytest.mark.parametrize("build", [of_mixtral, of_embedding, of_tokens, of_activated])
def test_a_second_adapter_has_matrices_of_its_own(build):
    case = build()
    texts = case.all_inputs()
    first = fitted(case)
    of_first = predicted(first, texts)
    drawn = draw_second_adapter(case.model)
    second = fitted(case)

    # The same weights as the only adapter of a model.
    other = build()
    weights = own_weights(other.model, "default")
    for name, weight in weights.items():
        weight.data.copy_(drawn[name])
    alone = fitted(other)
    found = curvature_of(second)
    expected = curvature_of(alone)
    assert_close(found, expected)
    found = predicted(second, texts)
    expected = predicted(alone, texts)
    assert_close(found, expected)
    # The first posterior still predicts by its own adapter.
    of_first_again = predicted(first, texts)
    assert_close(of_first_again, of_first)


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


@pytest.mark.parametrize("build", [of_mixtral, of_tokens])
def test_stages_train_and_keep_every_matrix(build, tmp_path):
    case = build()
    before: dict[str, Tensor] = {}
    for block in find_blocks(case.model):
        # In the trainer's precision: rounding alone must not look like learning.
        before[block.name] = block.weight.detach().float()
    trainer = trainer_for(case, tmp_path)
    la = laplace_lora_ext.train_in_stages(trainer)
    assert la.n_data == len(trainer.train_dataset)
    names_of_blocks = [block.name for block in la.blocks]
    assert names_of_blocks == list(before)
    for block in la.blocks:
        at_first = before[block.name]
        assert not torch.equal(block.weight, at_first), block.name
    inputs = first_inputs(case)
    read = laplace_lora_ext.from_pretrained(case.model, tmp_path)
    found = read(inputs)
    assert torch.equal(found, la(inputs))


def divergence(
    p: Tensor,
    q: Tensor,
) -> float:
    """Compute the mean divergence of probabilities from others `(N, C)`."""
    log_ratio = (p / q).log()
    of_each = (p * log_ratio).sum(-1)
    return of_each.mean().item()


@torch.no_grad()
def of_active_adapter(
    model: nn.Module,
    inputs: Batch,
) -> Tensor:
    """Compute class probabilities without a posterior."""
    model.eval()
    output = model(**inputs)
    return output.logits.softmax(-1)


def test_learnt_variances_are_near_those_of_every_matrix(case):
    la = fitted(case)
    # A prior so broad that the doubt changes probabilities.
    la.prior_precision = 0.1
    learnt = la.amortize(case.batches, unlabelled=None)
    errors: list[Tensor] = []
    for inputs in case.all_inputs():
        exact = la.predictive_moments(inputs)
        of_learnt = amortized_moments(la, inputs)
        assert_close(of_learnt.f_mu, exact.f_mu)
        found = log_variances(of_learnt.f_var)
        expected = log_variances(exact.f_var)
        # One of aLoRA's texts calls for no adapter, so that nothing is in doubt.
        largest = exact.f_var.flatten(1).amax(1)
        has_doubt = largest > 0
        error = found[has_doubt] - expected[has_doubt]
        errors.append(error)
    # Ridge regression errs less where it has learnt than where an example is left out.
    mean_error = torch.cat(errors).abs().mean()
    assert mean_error < learnt.mean_error + 1e-12
    # Even these are far from what a single logarithm of 0 would make of the mean.
    assert learnt.mean_error < 1.5


@pytest.mark.parametrize("build", [of_mixtral])
def test_a_student_has_the_doubt_of_every_matrix(build, tmp_path):
    case = build()
    # With the small head of an untrained model, doubt hardly changes probabilities.
    head = head_of(case.model)
    head.weight.data.mul_(8)
    trainer = trainer_for(
        case,
        tmp_path,
        max_steps=300,
        learning_rate=5e-3,
    )
    la = make(case.model)
    la.fit(case.batches)
    la.prior_precision = 1e-3
    inputs = first_inputs(case)
    targets = la(inputs)
    by_map = of_active_adapter(case.model, inputs)
    of_map = divergence(targets, by_map)
    # Otherwise there would be nothing to learn.
    assert of_map > 0.05

    assert la.distill(trainer) == "calibrated"
    case.model.set_adapter("calibrated")
    by_student = of_active_adapter(case.model, inputs)
    of_student = divergence(targets, by_student)
    assert of_student < 0.3 * of_map
    learnt = own_weights(case.model, "calibrated")
    teachers = own_weights(case.model, "default")
    for name, weight in teachers.items():
        assert not torch.equal(weight, learnt[name]), name


def brightness_told_by_class(n: int) -> list[dict]:
    """Draw images of three classes, each brighter than the last, more or less."""
    noise = torch.randn(n, 3, 16, 16, generator=generator())
    images = []
    for place, image in enumerate(noise):
        label = place % N_CLASSES
        brightness = label - 1.0
        labelled = {
            "pixel_values": image + brightness,
            "labels": label,
        }
        images.append(labelled)
    return images


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
        r=2,
        target_modules=["convolution"],
        modules_to_save=["classifier"],
    )
    return get_peft_model(base, lora)


def test_convolutions_train_in_stages_and_teach_a_student(tmp_path):
    model = resnet()
    data = brightness_told_by_class(24)
    trainer = trainer_of(
        tmp_path,
        model=model,
        data=data,
        max_steps=30,
        save_strategy="no",
    )
    la = laplace_lora_ext.train_in_stages(trainer)
    assert la.n_data == len(data)
    n_convolutions = 6
    assert len(la.blocks) == 2 * n_convolutions
    # A held-out fifth is five images: they may choose no doubt at all.
    la.prior_precision = 0.01
    images = [image["pixel_values"] for image in data[:6]]
    batch = {"pixel_values": torch.stack(images)}
    targets = la(batch)
    by_map = of_active_adapter(model, batch)
    of_map = divergence(targets, by_map)
    loader = DataLoader(data, batch_size=6)
    la.amortize(loader)
    by_learnt = la(batch, pred_type="amortized")
    of_learnt = divergence(targets, by_learnt)
    assert of_learnt < 0.3 * of_map
    name = la.distill(trainer)
    model.set_adapter(name)
    by_student = of_active_adapter(model, batch)
    of_student = divergence(targets, by_student)
    assert of_student < 0.3 * of_map


def test_adalora_has_no_second_adapter():
    model = of_singular_values().model
    message = r"single AdaLoRA adapter .* hold texts out"
    with pytest.raises(ValueError, match=message):
        add_fresh_adapter(model, "second")


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
    # A batch is looked at as a whole before its examples are, one at a time.
    n_of_a_fit = len(case.batches) + n_examples
    assert len(passes) == 2 * n_of_a_fit
    messages = [str(warning.message) for warning in caught]
    ours = [message for message in messages if "no linear layer" in message]
    # Of two fits, one.
    (message,) = ours
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
    batches = ragged_batches(lengths=[1], padded_to=1)
    la = fitted(Case(case.model, batches))
    sums_of_blocks = zip(la.blocks, la.H_facs.blocks, strict=True)
    n_without = 0
    for block, sums in sums_of_blocks:
        if ".experts." in block.name and sums.normalizer == 0:
            n_without += 1
    n_layers = 2
    # The token takes two of three experts in each layer.
    n_unused = 1
    # A and B of both parameters that are adapted.
    n_matrices = 2 * 2
    assert n_without == n_layers * n_unused * n_matrices
    (one_token,) = batches
    p = la(one_token)
    assert p.isfinite().all()


# --- which take part ------------------------------------------------------------------


def names(
    model: nn.Module,
    **selection,
) -> list[str]:
    """Name the blocks without what they have in common."""
    found = []
    for block in find_blocks(model, **selection):
        name = block.known_as
        found.append(name.removeprefix("base_model.model."))
    return found


def test_names_of_experts():
    model = of_experts("Mixtral").model
    found = names(model, layers_to_transform=0)
    experts = "model.layers.0.mlp.experts"
    assert f"{experts}.gate_up_proj.lora_A.weight[2]" in found
    assert f"{experts}.down_proj.lora_B.weight[0]" in found
    # A and B of q_proj, and of two parameters of each of three experts.
    n_matrices = 2 + 2 * 2 * 3
    assert len(found) == n_matrices
    assert len(set(found)) == n_matrices


def test_names_of_an_embedding_and_of_tokens():
    embeddings = "bert.embeddings.word_embeddings."
    selection = {"target_modules": ["word_embeddings"]}
    found = names(of_embedding().model, **selection)
    assert found == [
        f"{embeddings}lora_embedding_A",
        f"{embeddings}lora_embedding_B",
    ]
    (tokens,) = names(of_tokens().model, **selection)
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
    model = of_experts("Mixtral").model
    found = names(model, target_modules=[name])
    selected = set()
    for each in found:
        # A name ends with the parameter, the matrix, and the expert's weight.
        parameter, _, _ = each.split(".")[-3:]
        selected.add(parameter)
    assert selected == parameters
    # In two layers, A and B of three experts.
    n_of_parameter = 2 * 2 * 3
    assert len(found) == n_of_parameter * len(parameters)


def test_magnitudes_take_part_where_asked_for():
    case = of_convolutions_with_magnitudes()
    wanted = []
    for block in find_blocks(case.model):
        assert "magnitude" not in block.known_as
        wanted.append(block.known_as)
    for layer in ("first", "second", "last"):
        wanted.append(f"base_model.model.{layer}.lora_magnitude_vector.weight")
    # No name of a weight has a hyphen: none is left out.
    with_magnitudes = Case(case.model, case.batches, but="-")
    la = fitted(with_magnitudes, weight_names=wanted)
    expected = dense(with_magnitudes)
    H = expected.kronecker(softmax_fisher(expected.logits))
    found = la.H.to_matrix()
    assert_exact(found, H)


# --- refused --------------------------------------------------------------------------


def test_statistics_of_rows_are_refused_by_name():
    model = of_embedding().model
    settings = full_rank(kfac_approx="expand")
    message = r"kfac_approx='expand'.*lora_embedding_A.*Use"
    with pytest.raises(NotImplementedError, match=message):
        make(model, **settings)


def test_the_hosts_kron_is_refused_unless_linear_layers_alone_take_part():
    case = of_embedding()
    message = r"sees LoRA of linear.*lora_embedding_A.*leave these"
    with pytest.raises(NotImplementedError, match=message):
        make(case.model, "kron")
    make(case.model, "kron", target_modules=["query"])


def test_weights_that_processes_share_among_them_are_refused():
    model = lora_model("bert", target_modules=["word_embeddings"])
    embeddings = model.base_model.model.bert.embeddings
    # What PEFT sets where a layer is cut among processes.
    embeddings.word_embeddings.tp_layer = nn.Identity()
    message = r"word_embeddings \(Embedding\).*target_modules"
    with pytest.raises(NotImplementedError, match=message):
        find_blocks(model)
