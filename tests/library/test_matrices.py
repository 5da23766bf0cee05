"""Adapters of any kind: dense equality, draws, files and refusals."""

import copy
import warnings
from collections.abc import Iterator

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
from tests.support.dense import evidence, exact_ggn, softmax_fisher
from tests.support.matrices import (
    CASES,
    Case,
    dense,
    of_activated,
    of_attention,
    of_convolutions,
    of_embedding,
    of_experts,
    of_mixtral,
    of_singular_values,
    of_tokens,
)
from tests.support.models import N_CLASSES, lora_model, ragged_batches
from tests.support.posteriors import count_forward_passes, generator, make
from tests.support.trainers import trainer_of

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


def moments_of(
    la,
    case: Case,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Predict means and covariances of all batches' logits."""
    moments = [la.predictive_moments(case.inputs(batch)) for batch in case.batches]
    f_mu = torch.cat([of_batch.f_mu for of_batch in moments])
    f_var = torch.cat([of_batch.f_var for of_batch in moments])
    return f_mu, f_var


# --- exactness ------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["lowrank_kron", "full"])
def test_curvature_covariances_and_evidence_are_the_dense_ones(case, structure):
    la = fitted(case, structure)
    prior_precision = torch.linspace(0.3, 2.0, len(la.blocks)).double()
    la.prior_precision = prior_precision
    expected = dense(case)
    fisher = softmax_fisher(expected.logits)
    J = expected.jacobian
    if structure == "full":
        H, found = exact_ggn(J, fisher), la.H
    else:
        H, found = expected.kronecker(), la.H.to_matrix()
    near = {"rtol": 0, "atol": case.tolerance * H.abs().max().item()}
    assert_close(found, H, **near)
    assert_close(la.mean, expected.mean, rtol=0, atol=0)

    sizes = torch.tensor([value.numel() for value in expected.values])
    prior = prior_precision.repeat_interleave(sizes)
    covariance = J @ torch.linalg.inv(H + prior.diag()) @ J.mT
    f_mu, f_var = moments_of(la, case)
    assert_close(f_mu, expected.logits, rtol=case.tolerance, atol=case.tolerance)
    assert_close(
        f_var, covariance, rtol=0, atol=case.tolerance * covariance.abs().max().item()
    )

    log_likelihood = -cross_entropy(expected.logits, case.labels(), reduction="sum")
    log_evidence = evidence(H, log_likelihood, expected.mean, prior)
    assert_close(
        la.log_marginal_likelihood(), log_evidence, rtol=case.tolerance, atol=0
    )


def test_a_batch_of_one_and_a_checkpointed_model_give_the_same():
    case = of_embedding()
    expected = fitted(case)
    alone = Case(case.model, ragged_batches(batch_size=1), {})
    assert_close(fitted(alone).H.to_matrix(), expected.H.to_matrix())
    case.model.gradient_checkpointing_enable()
    assert_close(fitted(case).H.to_matrix(), expected.H.to_matrix())


def test_logits_that_depend_on_other_examples_are_back_propagated_through_the_batch():
    class Centred(nn.Module):
        """Subtracts the batch's mean."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = self.model(x)
            return logits - logits.mean(0) / 2

    case = of_convolutions()
    la = fitted(Case(Centred(case.model), case.batches, {}), "full")
    (X, _), *_ = case.batches
    weights = list(case.weights().values())

    def logits_of(*values: torch.Tensor) -> torch.Tensor:
        changed = dict(zip(case.weights(), values, strict=True))
        logits = torch.func.functional_call(case.model, changed, X)
        return logits - logits.mean(0) / 2

    Js = torch.func.jacrev(logits_of, argnums=tuple(range(len(weights))))(*weights)
    J = torch.cat([of_weight.flatten(2) for of_weight in Js], dim=-1)
    covariance = J @ torch.linalg.inv(la.H + torch.eye(len(la.H)).double()) @ J.mT
    assert_close(la.predictive_moments(X).f_var, covariance, rtol=1e-9, atol=1e-12)


def test_gradients_in_the_inputs_are_those_of_differences():
    case = of_convolutions()
    la = fitted(case, enable_backprop=True)
    X = case.batches[1][0].clone().requires_grad_()
    direction = torch.randn(X.shape, generator=generator()).double()
    (gradient,) = torch.autograd.grad(la(X)[:, 0].sum(), X)
    step = 1e-6
    ahead, behind = la(X + step * direction), la(X - step * direction)
    expected = (ahead - behind)[:, 0].sum() / (2 * step)
    assert_close((gradient * direction).sum(), expected.detach(), rtol=1e-6, atol=0)


# --- draws and files ------------------------------------------------------------------


def test_draws_are_adapters_and_a_posterior_survives_a_file(case, tmp_path):
    la = fitted(case)
    la.prior_precision = 50.0
    inputs = case.inputs(case.batches[0])
    drawn = la.predictive_samples(
        inputs, pred_type="nn", n_samples=2, generator=generator()
    )
    folders = la.sample_adapters(2, tmp_path / "draws", generator())
    for of_draw, folder in zip(drawn, folders, strict=True):
        model = copy.deepcopy(case.model)
        set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
        of_file = Case(model.double().eval(), case.batches, {})
        with torch.no_grad():
            probabilities = of_file.logits(inputs).softmax(-1)
        assert_close(probabilities, of_draw, rtol=1e-9, atol=1e-12)
        assert (probabilities - la.model(inputs).softmax(-1)).abs().max() > 1e-7

    la.save_pretrained(tmp_path)
    read = laplace_lora_ext.from_pretrained(case.model, tmp_path)
    assert torch.equal(read(inputs), la(inputs))
    assert torch.equal(read.log_marginal_likelihood(), la.log_marginal_likelihood())


def test_a_posterior_of_some_experts_leaves_the_others_as_they_are():
    case = of_experts("Mixtral")
    names = [
        block.known_as
        for block in find_blocks(case.model)
        if block.name.endswith("[1]")
    ]
    la = fitted(case, weight_names=names)
    assert la.n_params == sum(block.values.numel() for block in la.blocks)
    before = {name: weight.detach().clone() for name, weight in case.weights().items()}
    inputs = case.inputs(case.batches[0])
    la.predictive_samples(inputs, pred_type="nn", n_samples=1)
    for name, weight in case.weights().items():
        assert torch.equal(weight, before[name])


def test_the_model_stays_as_it_was(case):
    before = {name: weight.clone() for name, weight in case.model.state_dict().items()}
    flags = {
        name: weight.requires_grad for name, weight in case.model.named_parameters()
    }
    la = fitted(case)
    inputs = case.inputs(case.batches[0])
    la(inputs)
    la.predictive_samples(inputs, pred_type="nn", n_samples=1)
    assert {n: p.requires_grad for n, p in case.model.named_parameters()} == flags
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
    model = case.model
    first = fitted(case)
    of_first = moments_of(first, case)
    add_fresh_adapter(model, "second")
    drawn = own_weights(model, "second")
    for place, weight in enumerate(drawn.values()):
        values = torch.randn(weight.shape, generator=generator(place))
        weight.data.copy_(0.3 * values)
    second = fitted(case)
    # The same weights as the only adapter of a model.
    alone = build()
    for name, weight in own_weights(alone.model, "default").items():
        weight.data.copy_(drawn[name])
    expected = fitted(alone)
    assert_close(second.H.to_matrix(), expected.H.to_matrix())
    assert_close(moments_of(second, case), moments_of(expected, alone))
    assert_close(moments_of(first, case), of_first)
    both = laplace_lora_ext.LaplaceMixture([first, second])
    inputs = case.inputs(case.batches[0])
    assert_close(both(inputs), (first(inputs) + expected(inputs)) / 2)


def trainer_for(case: Case, folder, **settings):
    """Make a trainer of a case's texts, in float32."""
    rows = [
        {key: value[row] for key, value in batch.items()}
        for batch in case.batches
        for row in range(len(batch["labels"]))
    ]
    return trainer_of(
        folder,
        model=case.model.float(),
        data=rows * 3,
        save_strategy="no",
        **settings,
    )


@pytest.mark.parametrize("build", [of_mixtral, of_embedding, of_tokens])
def test_stages_train_and_keep_every_matrix(build, tmp_path):
    case = build()
    before = [block.weight.clone() for block in find_blocks(case.model)]
    trainer = trainer_for(case, tmp_path)
    la = laplace_lora_ext.train_in_stages(trainer)
    expected = [block.name for block in find_blocks(case.model)]
    assert [block.name for block in la.blocks] == expected
    assert la.n_data == len(trainer.train_dataset)
    moved = [
        not torch.equal(block.weight.double(), old)
        for block, old in zip(la.blocks, before, strict=True)
    ]
    assert all(moved)
    batch = case.inputs(case.batches[0])
    read = laplace_lora_ext.from_pretrained(case.model, tmp_path)
    assert torch.equal(read(batch), la(batch))


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Compute the mean divergence of probabilities from others `(N, C)`."""
    return (p * (p / q).log()).sum(-1).mean().item()


def test_learnt_variances_are_near_those_of_every_matrix(case):
    la = fitted(case)
    # A prior so broad that the doubt changes probabilities.
    la.prior_precision = 0.1
    learnt = la.amortize(case.batches, unlabelled=None)
    errors: list[torch.Tensor] = []
    for batch in case.batches:
        inputs = case.inputs(batch)
        f_mu, f_var = la.predictive_moments(inputs)
        exact = log_variances(f_var)
        # One of aLoRA's texts calls for no adapter, so that nothing is in doubt.
        has_doubt = f_var.flatten(1).amax(1) > 0
        of_learnt = amortized_moments(la, inputs)
        assert_close(of_learnt.f_mu, f_mu)
        errors.append((log_variances(of_learnt.f_var) - exact)[has_doubt])
    # Ridge regression errs less where it has learnt than where an example is left out.
    error = torch.cat(errors).abs().mean()
    assert error < learnt.mean_error + 1e-12
    # Even these are far from what a single logarithm of 0 would make of the mean.
    assert learnt.mean_error < 1.5


@pytest.mark.parametrize("build", [of_mixtral, of_embedding])
def test_a_student_has_the_doubt_of_every_matrix(build, tmp_path):
    case = build()
    # With the small head of an untrained model, doubt hardly changes probabilities.
    (head,) = [
        module["default"]
        for name, module in case.model.named_modules()
        if name.endswith("modules_to_save")
    ]
    head.weight.data.mul_(8)
    trainer = trainer_for(case, tmp_path, max_steps=300, learning_rate=5e-3)
    la = make(case.model)
    la.fit(case.batches)
    la.prior_precision = 1e-3
    batch = case.inputs(case.batches[0])
    targets = la(batch)

    def divergence_of_model() -> float:
        with torch.no_grad():
            return divergence(targets, case.model.eval()(**batch).logits.softmax(-1))

    of_map = divergence_of_model()
    assert of_map > 0.05
    assert la.distill(trainer) == "calibrated"
    case.model.set_adapter("calibrated")
    assert divergence_of_model() < 0.3 * of_map
    of_student = own_weights(case.model, "calibrated")
    for name, weight in own_weights(case.model, "default").items():
        assert not torch.equal(weight, of_student[name]) or "classifier" in name


def test_convolutions_train_in_stages_and_teach_a_student(tmp_path):
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
    model = get_peft_model(base, lora)
    labels = torch.arange(24) % N_CLASSES
    # An image's brightness tells its class, more or less.
    brightness = labels[:, None, None, None] - 1.0
    images = torch.randn(24, 3, 16, 16, generator=generator()) + brightness
    data = [
        {"pixel_values": image, "labels": label}
        for image, label in zip(images, labels.tolist(), strict=True)
    ]
    trainer = trainer_of(
        tmp_path, model=model, data=data, max_steps=30, save_strategy="no"
    )
    la = laplace_lora_ext.train_in_stages(trainer)
    assert la.n_data == len(data)
    assert len(la.blocks) == 2 * 6
    # A held-out fifth is five images: they may choose no doubt at all.
    la.prior_precision = 0.01
    batch = {"pixel_values": images[:6]}
    targets = la(batch)

    def by_model() -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(**batch).logits.softmax(-1)

    of_map = divergence(targets, by_model())
    la.amortize(torch.utils.data.DataLoader(data, batch_size=6))
    by_learnt = la(batch, pred_type="amortized")
    assert divergence(targets, by_learnt) < 0.3 * of_map
    model.set_adapter(la.distill(trainer))
    assert divergence(targets, by_model()) < 0.3 * of_map


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
    n_examples = sum(len(batch["labels"]) for batch in case.batches)
    assert len(passes) == 2 * (n_examples + len(case.batches))
    (ours,) = [
        str(each.message) for each in caught if "no linear layer" in str(each.message)
    ]
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
    one = {
        key: value[:1, :1] for key, value in case.batches[0].items() if key != "labels"
    }
    one["labels"] = case.batches[0]["labels"][:1]
    la = fitted(Case(case.model, [one], {}))
    traces = [
        of_block.normalizer.item()
        for block, of_block in zip(la.blocks, la.H_facs.blocks, strict=True)
        if ".experts." in block.name
    ]
    # A token takes two of three experts in each of two layers; each has two matrices,
    # of A and B.
    assert sum(trace == 0 for trace in traces) == 8
    assert torch.isfinite(la(one)).all()


# --- which take part ------------------------------------------------------------------


def names(
    model: nn.Module,
    **selection,
) -> list[str]:
    """Name the blocks without what they have in common."""
    found = [block.known_as for block in find_blocks(model, **selection)]
    return [name.removeprefix("base_model.model.") for name in found]


def test_names_of_each_kind():
    of_layer = "model.layers.0.mlp.experts."
    experts = names(of_experts("Mixtral").model, layers_to_transform=0)
    assert f"{of_layer}gate_up_proj.lora_A.weight[2]" in experts
    assert f"{of_layer}down_proj.lora_B.weight[0]" in experts
    assert len(set(experts)) == len(experts) == 2 + 2 * 2 * 3
    embeddings = "bert.embeddings.word_embeddings."
    assert names(of_embedding().model, target_modules=["word_embeddings"]) == [
        f"{embeddings}lora_embedding_A",
        f"{embeddings}lora_embedding_B",
    ]
    (tokens,) = names(of_tokens().model, target_modules=["word_embeddings"])
    assert tokens.startswith(embeddings)
    assert tokens.endswith("trainable_tokens_delta")
    assert sorted(names(of_attention().model, target_modules=["attention"])) == [
        "attention.lora_A.weight",
        "attention.lora_B.weight",
        "attention.out_proj.lora_A.weight",
        "attention.out_proj.lora_B.weight",
    ]


@pytest.mark.parametrize("name", ["experts", "gate_up_proj", "experts.gate_up_proj"])
def test_experts_are_selected_by_their_module_or_their_parameter(name):
    found = names(of_experts("Mixtral").model, target_modules=[name])
    assert all(".gate_up_proj." in each for each in found) == (name != "experts")
    assert len(found) == 2 * 2 * 3 * (2 if name == "experts" else 1)


def test_magnitudes_take_part_where_asked_for():
    case = of_convolutions(use_dora=True)
    assert not any("magnitude" in name for name in names(case.model))
    all_names = [block.known_as for block in find_blocks(case.model)]
    magnitudes = [
        f"base_model.model.{layer}.lora_magnitude_vector.weight"
        for layer in ("first", "second", "last")
    ]
    with_magnitudes = Case(case.model, case.batches, {}, but="-")
    la = fitted(with_magnitudes, weight_names=all_names + magnitudes)
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
