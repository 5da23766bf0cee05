"""Ways a model may use its layers, and every likelihood."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from laplace import Laplace
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.func import functional_call, jacrev

import laplace_lora_ext  # noqa: F401
from laplace_lora_ext.passes import recording as passes
from tests.tiny_models import VOCABULARY, TwoLinear, laplace_keywords, lora_model, ragged_batches

STRUCTURES = ["lowrank_kron", "kron", "diag", "full"]
KFAC_APPROX = ["gradient", "expand", "reduce"]
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def with_lora(model: nn.Module, *target_modules: str, r: int = 2) -> nn.Module:
    """An adapter in the named layers, in float64, whose `lora_B` is not 0."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    inject_adapter_in_model(LoraConfig(r=r, target_modules=list(target_modules)), model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    return model.double().eval()


def make(
    model: nn.Module,
    structure: str = "lowrank_kron",
    likelihood: str = "classification",
    **kwargs: Any,
):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The posterior is over")
        return Laplace(
            model, likelihood, subset_of_weights="lora", hessian_structure=structure, **kwargs
        )


def sequences(n: int = 4, length: int = 3, n_inputs: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, length, n_inputs, generator=generator).double(), torch.arange(n) % 3


def functorch_jacobians(la: Any, model: nn.Module, X: Any) -> torch.Tensor:
    """`(B, C, parameters)` in the order of the blocks, by torch alone."""
    names = [block.name for block in la.blocks]
    weights = {name: model.get_parameter(name).detach() for name in names}
    Js = jacrev(lambda w: functional_call(model, w, (X,)))(weights)
    return torch.cat([Js[name].flatten(2) for name in names], dim=-1)


def fisher_at_logits(logits: torch.Tensor) -> torch.Tensor:
    p = logits.softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None]


def gradient_curvature(la: Any, Js: torch.Tensor, H: torch.Tensor) -> torch.Tensor:
    """The dense curvature of `kfac_approx="gradient"`, from Jacobians."""
    blocks = []
    for block, J in zip(la.blocks, Js.split(la._sizes, dim=-1), strict=True):
        J = J.contiguous().unflatten(-1, block.weight.shape)
        weighted = torch.einsum("bcd,bdij->bcij", H, J)
        F_out = torch.einsum("bcij,bckj->ik", J, weighted)
        F_in = torch.einsum("bcij,bcik->jk", J, weighted)
        blocks.append(torch.kron(F_out, F_in) / F_out.trace())
    return torch.block_diag(*blocks)


def exact_ggn(Js: torch.Tensor, H: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bcp,bcd,bdq->pq", Js, H, Js)


# --- rows ----------------------------------------------------------------------------------------


class Rows(nn.Module):
    """Runs its layers on `(B, T, d)`, then averages the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLinear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mean(1)


class FlatRows(Rows):
    """The same function, whose layers see `(B * T, d)`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(0, -2)).unflatten(0, x.shape[:-1]).mean(1)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_flattened_rows_give_the_posterior_of_rows_by_example(kfac_approx):
    (X, y), posteriors = sequences(), []
    for model in (Rows(), FlatRows()):
        la = make(with_lora(model, "first", "second"), backend_kwargs={"kfac_approx": kfac_approx})
        la.fit([(X, y), (X[:3] + 1, y[:3])])
        posteriors.append(la)
    rows, flat = posteriors
    torch.testing.assert_close(flat.H.to_matrix(), rows.H.to_matrix(), **EXACT)
    torch.testing.assert_close(flat(X), rows(X), **EXACT)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_flattened_rows_give_the_jacobians_of_rows_by_example(structure):
    (X, y), posteriors = sequences(), []
    for model in (Rows(), FlatRows()):
        la = make(with_lora(model, "first", "second"), structure)
        la.fit([(X, y)])
        posteriors.append(la.H)
    torch.testing.assert_close(*posteriors, **EXACT)


class FlatTokens(nn.Module):
    """Embeds tokens and flattens the positions of all examples, as some experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.inner = TwoLinear()

    def forward(self, batch: Mapping | torch.Tensor) -> torch.Tensor:
        ids = batch["input_ids"] if isinstance(batch, Mapping) else batch
        mask = batch["attention_mask"] if isinstance(batch, Mapping) else torch.ones_like(ids)
        weights = mask / mask.sum(1, keepdim=True)
        rows = self.inner(self.embedding(ids).flatten(0, 1)).unflatten(0, ids.shape)
        return torch.einsum("bt,btc->bc", weights.to(rows), rows)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_flattened_rows_of_a_padded_mapping_do_not_count_padding(kfac_approx):
    model, matrices = with_lora(FlatTokens(), "first", "second"), []
    for padded_to in (7, 11):
        la = make(model, backend_kwargs={"kfac_approx": kfac_approx})
        la.fit(ragged_batches(padded_to=padded_to))
        matrices.append(la.H.to_matrix())
    torch.testing.assert_close(*matrices, **EXACT)


def test_flattened_rows_of_a_tensor_of_tokens_are_handled():
    model = with_lora(FlatTokens(), "first", "second")
    (batch,) = ragged_batches(lengths=(6, 6, 6), padded_to=6)
    mapping, tensor = make(model), make(model)
    mapping.fit([batch])
    tensor.fit([(batch["input_ids"], batch["labels"])])
    torch.testing.assert_close(tensor.H.to_matrix(), mapping.H.to_matrix(), **EXACT)


class ManyDimensions(nn.Module):
    """Its layers see `(B, height, width, d)`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLinear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mean((1, 2))


def test_several_dimensions_of_positions_are_positions():
    X, y = sequences(length=6)
    posteriors = []
    for model, inputs in ((Rows(), X), (ManyDimensions(), X.unflatten(1, (2, 3)))):
        la = make(with_lora(model, "first", "second"))
        la.fit([(inputs, y)])
        posteriors.append(la.H.to_matrix())
    torch.testing.assert_close(*posteriors, **EXACT)


# --- reused layers -------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Calls one LoRA layer twice in a forward pass, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.shared(self.shared(x).tanh()).tanh().mean(1))


@pytest.fixture
def recurrent() -> nn.Module:
    return with_lora(Recurrent(), "shared", "head")


def test_a_layer_that_is_called_twice_has_the_curvature_of_its_jacobian(recurrent):
    (X, y), la = sequences(), make(recurrent)
    la.fit([(X, y)])
    Js, H = functorch_jacobians(la, recurrent, X), fisher_at_logits(recurrent(X).detach())
    torch.testing.assert_close(la.H.to_matrix(), gradient_curvature(la, Js, H), **EXACT)
    torch.testing.assert_close(la.H.to_matrix().trace(), exact_ggn(Js, H).trace(), **EXACT)


def test_a_layer_that_is_called_twice_has_one_jacobian(recurrent):
    (X, y), la = sequences(), make(recurrent)
    la.fit([(X, y)])
    Js, f = la.backend.jacobians(X)
    torch.testing.assert_close(Js, functorch_jacobians(la, recurrent, X), **EXACT)
    torch.testing.assert_close(f, recurrent(X).detach(), **EXACT)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_a_layer_that_is_called_twice_has_the_exact_ggn(recurrent, structure):
    (X, y), la = sequences(), make(recurrent, structure)
    la.fit([(X, y)])
    expected = exact_ggn(
        functorch_jacobians(la, recurrent, X), fisher_at_logits(recurrent(X).detach())
    )
    torch.testing.assert_close(la.H, expected.diag() if structure == "diag" else expected, **EXACT)


def test_a_layer_that_is_called_twice_predicts_from_its_jacobian(recurrent):
    (X, y), la = sequences(), make(recurrent)
    la.fit([(X, y)])
    Js = functorch_jacobians(la, recurrent, X)
    precision = la.H.to_matrix() + la.prior_precision * torch.eye(la.n_params).double()
    expected = Js @ precision.inverse() @ Js.mT
    f_mu, f_var = la._glm_predictive_distribution(X)
    torch.testing.assert_close(f_mu, recurrent(X).detach(), **EXACT)
    torch.testing.assert_close(f_var, expected, **EXACT)
    torch.testing.assert_close(la.functional_variance(Js), expected, **EXACT)


def test_calls_of_a_layer_count_as_positions_in_expand(recurrent):
    la = make(recurrent, backend_kwargs={"kfac_approx": "expand"})
    la.fit([sequences(n=4, length=3)])
    normalizers = {b.name: k.normalizer for b, k in zip(la.blocks, la.H_facs.blocks, strict=True)}
    assert normalizers["shared.lora_A.default.weight"] == 2 * 4 * 3
    assert normalizers["head.lora_A.default.weight"] == 4


class Detour(nn.Module):
    """One of its LoRA layers runs, and the logits do not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.unused = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.unused(x)
        return self.used(x)


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_a_layer_that_the_logits_do_not_depend_on_has_no_curvature(structure):
    model = with_lora(Detour(), "used", "unused")
    la, alone = make(model, structure), make(model, structure, target_modules=["used"])
    X, y = sequences()
    for posterior in (la, alone):
        posterior.fit([(X[:, 0], y)])
    torch.testing.assert_close(la(X[:, 0]), alone(X[:, 0]), **EXACT)
    torch.testing.assert_close(
        la.log_det_posterior_precision, alone.log_det_posterior_precision, **EXACT
    )  # at a prior precision of 1 the other blocks add log 1


# --- likelihoods ---------------------------------------------------------------------------------


@pytest.fixture
def regressor() -> nn.Module:
    return with_lora(TwoLinear(n_outputs=2), "first", "second")


def targets(n: int = 4, n_outputs: int = 2) -> torch.Tensor:
    return torch.randn(n, n_outputs, generator=torch.Generator().manual_seed(2)).double()


def test_regression_has_the_curvature_of_the_squared_error(regressor):
    X, la = sequences()[0][:, 0], make(regressor, likelihood="regression")
    la.fit([(X, targets())])
    Js = functorch_jacobians(la, regressor, X)
    H = torch.eye(2).double().expand(4, 2, 2)
    torch.testing.assert_close(la.H.to_matrix(), gradient_curvature(la, Js, H), **EXACT)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_regression_loss_is_half_the_sum_of_squares(regressor, structure):
    X, y = sequences()[0][:, 0], targets()
    la = make(regressor, structure, "regression")
    la.fit([(X[:3], y[:3]), (X[3:], y[3:])])
    expected = (regressor(X).detach() - y).square().sum() / 2
    torch.testing.assert_close(la.loss, expected, **EXACT)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_regression_predicts_mean_and_covariance(regressor, structure):
    X, la = sequences()[0][:, 0], make(regressor, structure, "regression", sigma_noise=0.5)
    la.fit([(X, targets())])
    f_mu, f_var = la(X)
    torch.testing.assert_close(f_mu, regressor(X).detach(), **EXACT)
    assert f_var.shape == (4, 2, 2)
    torch.testing.assert_close(
        f_var, la.functional_variance(functorch_jacobians(la, regressor, X)), **EXACT
    )
    joint_mu, joint_var = la(X, joint=True)
    assert joint_mu.shape == (8,)
    for i in range(4):
        block = joint_var[2 * i : 2 * i + 2, 2 * i : 2 * i + 2]
        torch.testing.assert_close(block, f_var[i], **EXACT)


def test_noise_scales_the_curvature_of_regression(regressor):
    X, la = sequences()[0][:, 0], make(regressor, likelihood="regression", sigma_noise=0.5)
    la.fit([(X, targets())])
    expected = la.H.to_matrix() * 4 + torch.eye(la.n_params).double()
    torch.testing.assert_close(la.posterior_precision.to_matrix(), expected, **EXACT)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_regression_with_one_output_takes_targets_with_and_without_a_column(shape):
    model = with_lora(TwoLinear(n_outputs=1), "first")
    X, la = sequences()[0][:, 0], make(model, likelihood="regression")
    la.fit([(X, targets(n_outputs=1).reshape(shape))])
    expected = (model(X).detach() - targets(n_outputs=1)).square().sum() / 2
    torch.testing.assert_close(la.loss, expected, **EXACT)


class Rewards(nn.Module):
    """As in the host's example: `(B, 2, d)` pairs to `(B, 2)`, and `(B, d)` to `(B, 1)`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLinear(n_outputs=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(0, -2)).reshape(len(x), -1)


class TokenRewards(nn.Module):
    """The same around a transformer: `(B, 2, T)` tokens to `(B, 2)`, and `(B, T)` to `(B, 1)`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = lora_model("bert", n_labels=1)

    def forward(self, batch: Mapping) -> torch.Tensor:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        flat = {"input_ids": ids.flatten(0, -2), "attention_mask": mask.flatten(0, -2)}
        return self.inner(**flat).logits.reshape(len(ids), -1)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_rewards_are_fitted_on_preferences_and_predicted_one_by_one(structure):
    model = with_lora(Rewards(), "first", "second")
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randn(6, 2, 5, generator=generator).double()
    preferred = torch.arange(6) % 2
    la = make(model, structure, "reward_modeling")
    la.fit([(pairs[:4], preferred[:4]), (pairs[4:], preferred[4:])])
    expected = nn.functional.cross_entropy(model(pairs), preferred, reduction="sum").detach()
    torch.testing.assert_close(la.loss, expected, **EXACT)
    f_mu, f_var = la(pairs[:, 0])
    assert f_mu.shape == (6, 1)
    assert f_var.shape == (6, 1, 1)
    torch.testing.assert_close(f_mu, model(pairs[:, 0]).detach(), **EXACT)
    probabilities = la(pairs, fitting=True)
    assert probabilities.shape == (6, 2)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(6).double())


def test_rewards_have_the_curvature_of_preferences():
    model = with_lora(Rewards(), "first", "second")
    pairs = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(1)).double()
    la = make(model, likelihood="reward_modeling")
    la.fit([(pairs, torch.arange(6) % 2)])
    Js, H = functorch_jacobians(la, model, pairs), fisher_at_logits(model(pairs).detach())
    torch.testing.assert_close(la.H.to_matrix(), gradient_curvature(la, Js, H), **EXACT)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_rewards_of_a_padded_transformer_do_not_count_padding(kfac_approx):
    matrices = []
    for padded_to in (7, 11):
        (batch,) = ragged_batches(batch_size=8, padded_to=padded_to)
        pairs = {key: batch[key].unflatten(0, (4, 2)) for key in ("input_ids", "attention_mask")}
        la = make(
            TokenRewards(),
            likelihood="reward_modeling",
            backend_kwargs={"kfac_approx": kfac_approx},
        )
        la.fit([{**pairs, "labels": torch.tensor([0, 1, 1, 0])}])
        matrices.append(la.H.to_matrix())
        assert la({k: v[:, 0] for k, v in pairs.items()})[0].shape == (4, 1)
    torch.testing.assert_close(*matrices, rtol=1e-7, atol=1e-12)


# --- sizes ---------------------------------------------------------------------------------------


def test_two_classes_have_the_curvature_of_a_coin():
    model = with_lora(TwoLinear(n_outputs=2), "first", "second")
    X, la = sequences()[0][:, 0], make(model)
    la.fit([(X, torch.tensor([0, 1, 1, 0]))])
    Js = functorch_jacobians(la, model, X)
    p = model(X).detach().softmax(-1)
    difference = (Js[:, 0] - Js[:, 1]) * p.prod(-1, keepdim=True).sqrt()
    expected = gradient_curvature(la, difference[:, None], torch.ones(4, 1, 1).double())
    torch.testing.assert_close(la.H.to_matrix(), expected, **EXACT)
    assert la(X).shape == (4, 2)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_two_classes_work_in_every_structure(structure):
    la = make(lora_model("bert", n_labels=2), structure)
    la.fit(ragged_batches(n_classes=2))
    for link in ("probit", "mc", "bridge"):
        probabilities = la(ragged_batches()[0], link_approx=link)
        assert probabilities.shape == (3, 2)
        torch.testing.assert_close(probabilities.sum(1), torch.ones(3).double())


@pytest.mark.parametrize("kind", ["bert", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_batches_of_one_give_the_posterior_of_larger_ones(kind, structure):
    evidences, predictions = [], []
    for batch_size in (1, 3):
        la = make(lora_model(kind), structure, **laplace_keywords(kind))
        la.fit(ragged_batches(batch_size=batch_size))
        evidences.append(la.log_marginal_likelihood())
        batches = ragged_batches(batch_size=batch_size)
        predictions.append(torch.cat([la(batch) for batch in batches]))
    torch.testing.assert_close(*evidences, rtol=1e-7, atol=0)
    torch.testing.assert_close(*predictions, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("length", [1, 5])
def test_a_single_example_can_be_fitted_and_predicted(kind, length):
    (batch,) = ragged_batches(lengths=(length,), padded_to=length)
    la = make(lora_model(kind), **laplace_keywords(kind))
    la.fit([batch])
    assert la.n_data == 1
    assert la(batch).shape == (1, 3)
    assert torch.isfinite(la.log_marginal_likelihood())


def test_many_classes_need_one_backward_pass_less_than_classes(monkeypatch):
    monkeypatch.setattr(passes, "_ROWS", 1)  # one seed a pass
    model = with_lora(TwoLinear(n_outputs=7), "first")
    calls = []

    class Count(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            return logits.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return gradient

    model.register_forward_hook(lambda module, args, output: Count.apply(output))
    la = make(model)
    la.fit([(sequences()[0][:, 0], torch.arange(4))])
    assert len(calls) == 6


def test_inputs_that_require_a_gradient_change_nothing():
    """Not every graph ends in the first LoRA layers."""
    inputs = sequences()[0][:, 0]
    curvatures = []
    for requires_grad in (False, True):
        la = make(with_lora(TwoLinear(n_outputs=3), "first", "second"))
        la.fit([(inputs.clone().requires_grad_(requires_grad), torch.arange(4) % 3)])
        curvatures.append(la.H.to_matrix())
    torch.testing.assert_close(*curvatures)
    assert curvatures[0].any()


def test_logits_without_a_gradient_are_refused():
    model = with_lora(TwoLinear(n_outputs=3), "first", "second")
    model.register_forward_hook(lambda module, args, output: output.detach())
    with pytest.raises(RuntimeError, match="no gradient to the LoRA layers"):
        make(model).fit([(sequences()[0][:, 0], torch.arange(4) % 3)])


class Halving(nn.Module):
    """Joins neighbouring positions before its LoRA layer, so that the mask does not fit it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 5)
        self.layer = nn.Linear(10, 3)

    def forward(self, batch) -> torch.Tensor:
        pairs = self.embed(batch["input_ids"]).unflatten(1, (-1, 2)).flatten(2)
        return self.layer(pairs).sum(1)


@pytest.mark.parametrize("kfac_approx", ["gradient", "expand", "reduce"])
def test_a_mask_of_other_positions_is_refused_only_where_it_is_needed(kfac_approx):
    model = Halving()
    settings = LoraConfig(target_modules=["layer"], r=2, init_lora_weights=False)
    model = inject_adapter_in_model(settings, model).requires_grad_(False)
    la = Laplace(
        model,
        "classification",
        subset_of_weights="lora",
        hessian_structure="lowrank_kron",
        backend_kwargs={"kfac_approx": kfac_approx},
    )
    batches = ragged_batches(padded_to=8)
    if kfac_approx == "gradient":
        la.fit(batches)
        assert la(batches[0]).shape == (3, 3)
    else:
        with pytest.raises(NotImplementedError, match='use kfac_approx="gradient"'):
            la.fit(batches)
