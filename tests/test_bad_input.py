"""Errors and warnings about data, by type and message."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from laplace import Laplace
from laplace.curvature.curvlinops import CurvlinopsGGN
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from laplace_lora_ext import LowRankKronEF, LowRankKronGGN
from tests.tiny_models import TwoLinear, lora_model, ragged_batches

STRUCTURES = ["lowrank_kron", "kron", "diag", "full"]
KFAC_APPROX = ["gradient", "expand", "reduce"]


def with_lora(model: nn.Module, *target_modules: str) -> nn.Module:
    """An adapter in the named layers, in float64, whose `lora_B` is not 0."""
    torch.manual_seed(0)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=list(target_modules)), model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model.double()


def plain_model(n_outputs: int = 3) -> nn.Module:
    return with_lora(TwoLinear(n_outputs=n_outputs), "first", "second")


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


def data(n: int = 4, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=generator).double(), torch.arange(n) % 3


@pytest.fixture(params=STRUCTURES)
def la(request: pytest.FixtureRequest):
    return make(plain_model(), request.param)


# --- labels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [-1, -100, 3, 7])
def test_labels_out_of_range_are_refused(la, label):
    X, y = data()
    bad = y.clone()
    bad[2] = label
    with pytest.raises(ValueError, match=rf"batch 1: labels must be from 0 to 2, not .*{label}"):
        la.fit([(X, y), (X, bad)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.bfloat16])
def test_labels_that_are_no_integers_are_refused(la, dtype):
    X, y = data()
    with pytest.raises(ValueError, match=rf"batch 0: labels must be class indices.*{dtype}"):
        la.fit([(X, y.to(dtype))])


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
def test_labels_of_any_integer_type_are_taken(la, dtype):
    X, y = data()
    la.fit([(X, y.to(dtype))])
    evidence = la.log_marginal_likelihood()
    la.fit([(X, y)])
    assert torch.equal(evidence, la.log_marginal_likelihood())


@pytest.mark.parametrize("shape", [(3,), (5,), (4, 1), (4, 3), (2, 2)], ids=str)
def test_labels_of_another_shape_are_refused(la, shape):
    X, _ = data()
    expected = re.escape(f"batch 0: labels must be class indices of shape (4,), not {shape}")
    with pytest.raises(ValueError, match=expected):
        la.fit([(X, torch.zeros(shape, dtype=torch.long))])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_missing_labels_are_refused_by_batch_and_say_which_keys_there_are(structure):
    la, batches = make(lora_model("bert"), structure), ragged_batches()
    del batches[1]["labels"]
    with pytest.raises(
        ValueError, match=r"batch 1: No labels 'labels'.*attention_mask.*input_ids.*dict_key_y"
    ):
        la.fit(batches)


def test_labels_under_another_key_are_found_by_dict_key_y():
    batches = [{**b, "answer": b["labels"]} for b in ragged_batches()]
    for batch in batches:
        del batch["labels"]
    la = make(lora_model("bert"), dict_key_y="answer")
    la.fit(batches)
    assert la.n_data == 8


@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_class_is_refused(structure):
    la = make(plain_model(n_outputs=1), structure)
    with pytest.raises(ValueError, match="two outputs or more"):
        la.fit([(data()[0], torch.zeros(4, dtype=torch.long))])


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("shape", [(3, 2), (4,), (4, 1), (4, 2, 1)], ids=str)
def test_regression_targets_of_another_shape_are_refused(structure, shape):
    la = make(plain_model(n_outputs=2), structure, "regression")
    expected = re.escape(f"batch 0: targets {shape} for outputs (4, 2)")
    with pytest.raises(ValueError, match=expected):
        la.fit([(data()[0], torch.zeros(shape).double())])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_regression_targets_that_are_not_finite_are_refused(value):
    la = make(plain_model(n_outputs=2), likelihood="regression")
    X, y = data()[0], torch.zeros(4, 2).double()
    bad = y.clone()
    bad[3, 1] = value
    with pytest.raises(ValueError, match="batch 1: non-finite targets"):
        la.fit([(X, y), (X, bad)])


# --- loaders and batches -------------------------------------------------------------------------


@pytest.mark.parametrize("loader", [[], iter(()), DataLoader(TensorDataset(torch.zeros(0, 5)))])
def test_an_empty_loader_is_refused(la, loader):
    with pytest.raises(ValueError, match="no data"):
        la.fit(loader)


@pytest.mark.parametrize(
    "batch",
    [data()[0], (data()[0],), (*data(), None), None, "text"],
    ids=lambda b: type(b).__name__,
)
def test_a_batch_that_is_neither_a_mapping_nor_a_pair_is_refused(la, batch):
    with pytest.raises(TypeError, match=r"mapping with labels or a pair \(X, y\)"):
        la.fit([batch])


def test_a_data_set_that_is_seen_whole_gives_no_warning(la):
    loader = DataLoader(TensorDataset(*data(6)), batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.fit(loader)
    assert la.n_data == 6


def test_drop_last_counts_what_was_seen_and_warns(la):
    X, y = data(6)
    loader = DataLoader(TensorDataset(X, y), batch_size=4, drop_last=True)
    with pytest.warns(UserWarning, match=r"4 examples.*data set has 6") as caught:
        la.fit(loader)
    assert la.n_data == 4
    assert len(caught) == 1
    assert caught[0].filename == __file__
    evidence = la.log_marginal_likelihood()
    la.fit([(X[:4], y[:4])])
    assert torch.equal(evidence, la.log_marginal_likelihood())


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from zip(*data(6), strict=True)


def test_an_iterable_data_set_is_counted(la):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.fit(DataLoader(Stream(), batch_size=4))
    assert la.n_data == 6
    evidence = la.log_marginal_likelihood()
    la.fit(DataLoader(TensorDataset(*data(6)), batch_size=4))
    assert torch.equal(evidence, la.log_marginal_likelihood())


def test_a_generator_of_batches_is_counted(la):
    la.fit(data(n) for n in (4, 2))
    assert la.n_data == 6


# --- numbers that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_activation_that_is_not_finite_names_the_first_layer_that_sees_it(structure, value):
    model = lora_model("bert")
    layer = model.base_model.model.bert.encoder.layer[0]
    layer.attention.self.value.base_layer.weight.data[0, 0] = value
    la = make(model, structure)
    with pytest.raises(
        ValueError, match=r"batch 0: LoRA layer \S*layer\.1\.\S*query\.lora_A\S*: non-finite"
    ):
        la.fit(ragged_batches())


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_every_approximation_names_the_layer_of_an_activation(kfac_approx):
    model = lora_model("gpt2")
    model.base_model.model.transformer.h[1].attn.c_attn.lora_A["default"].weight.data[0] = torch.nan
    la = make(model, class_token_ids=[1, 2], backend_kwargs={"kfac_approx": kfac_approx})
    batches = ragged_batches(n_classes=2)
    with pytest.raises(ValueError, match=r"batch 0: LoRA layer \S*h\.1\.attn\.c_attn\.lora_A"):
        la.fit(batches)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_bad_example_in_a_later_batch_names_the_batch_and_the_layer(la, value):
    X, y = data()
    bad = X.clone()
    bad[1, 2] = value
    with pytest.raises(ValueError, match=r"batch 2: LoRA layer first\.lora_A\S*: non-finite"):
        la.fit([(X, y), (X, y), (bad, y), (X, y)])


class Squashed(nn.Module):
    """Hides an infinite activation: `tanh` makes it 1, and the logits stay finite."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_an_infinite_activation_behind_finite_logits_is_noticed(kfac_approx):
    model = with_lora(Squashed(), "first")
    la = make(model, backend_kwargs={"kfac_approx": kfac_approx})
    model.first.lora_A["default"].weight.data.zero_()[0, 0] = 1e308
    X, y = data()
    X[:, 0] = 5
    assert torch.isfinite(model(X)).all()
    with pytest.raises(ValueError, match=r"batch 0: LoRA layer first\.lora_B\S+: non-finite"):
        la.fit([(X, y)])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_logits_that_are_not_finite_behind_finite_layers_are_refused(structure):
    model = lora_model("bert")
    model.classifier.modules_to_save["default"].bias.data[0] = torch.nan
    with pytest.raises(ValueError, match="batch 0: non-finite logits"):
        make(model, structure).fit(ragged_batches())


class RootOfZero(nn.Module):
    """Its logits are finite, and their derivative is not: 0 times the root's slope at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLinear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.inner(x)
        return logits + (logits * 0).square().sqrt()


def root_of_zero(structure: str = "lowrank_kron", **kwargs: Any):
    return make(with_lora(RootOfZero(), "first", "second"), structure, **kwargs)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_every_approximation_names_the_layer_of_a_gradient_that_is_not_finite(kfac_approx):
    la = root_of_zero(backend_kwargs={"kfac_approx": kfac_approx})
    X, y = data()
    with pytest.raises(
        ValueError, match=r"batch 0: LoRA layer inner\.second\.lora_B\S*: non-finite"
    ):
        la.fit([(X, y)])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_no_structure_takes_a_gradient_that_is_not_finite(structure):
    la = root_of_zero(structure)
    with pytest.raises(ValueError, match=r"batch 0: .*non-finite"):
        la.fit([data()])


def test_a_prediction_names_the_layer_of_an_activation_that_is_not_finite(la):
    X, y = data()
    la.fit([(X, y)])
    with pytest.raises(ValueError, match=r"LoRA layer first\.lora_A\S*: non-finite"):
        la(X * torch.nan)


# --- rows ----------------------------------------------------------------------------------------


class PositionsFirst(nn.Module):
    """Runs its layers on `(T, B, d)`, as `nn.Transformer` does by default."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLinear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(0, 1)).mean(0)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_rows_that_cannot_be_assigned_to_examples_are_refused(kfac_approx):
    model = with_lora(PositionsFirst(), "first", "second")
    la = make(model, backend_kwargs={"kfac_approx": kfac_approx})
    X = torch.randn(4, 7, 5).double()
    with pytest.raises(
        NotImplementedError, match=r"batch 0: LoRA layer inner\.\S+: its rows, \(7, 4, \d\)"
    ):
        la.fit([(X, data()[1])])


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_rows_that_cannot_be_assigned_to_examples_are_refused_in_jacobians(structure):
    la = make(with_lora(PositionsFirst(), "first"), structure)
    with pytest.raises(NotImplementedError, match=r"LoRA layer inner\.first\S+: its rows"):
        la.fit([(torch.randn(4, 7, 5).double(), data()[1])])


# --- bypassed layers -----------------------------------------------------------------------------


class Fused(nn.Module):
    """Reads the LoRA weights and does not run the layers, as a fused kernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        A, B = self.layer.lora_A["default"].weight, self.layer.lora_B["default"].weight
        return self.layer.base_layer(x) + x @ A.T @ B.T


@pytest.mark.parametrize("structure", STRUCTURES)
def test_bypassed_layers_are_noticed_on_the_first_batch(structure):
    la = make(with_lora(Fused(), "layer"), structure)
    seen = []

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in range(3):
            seen.append(index)
            yield data()

    with pytest.raises(RuntimeError, match=r"2 of 2 LoRA layers were bypassed.*layer\.lora_A"):
        la.fit(batches())
    assert seen == [0]


class HalfFused(Fused):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.before(x))


def test_a_single_bypassed_layer_is_noticed():
    la = make(with_lora(HalfFused(), "layer", "before"))
    with pytest.raises(RuntimeError, match=r"2 of 4 LoRA layers were bypassed.*layer\.lora_A"):
        la.fit([data()])


# --- settings ------------------------------------------------------------------------------------


def test_an_unknown_approximation_is_refused_and_says_which_there_are():
    with pytest.raises(ValueError, match=r"'kfac'.*expand.*reduce.*gradient"):
        make(plain_model(), backend_kwargs={"kfac_approx": "kfac"}).fit([data()])


def test_a_negative_rank_is_refused():
    with pytest.raises(ValueError, match=r"rank must not be negative, and is -3"):
        make(plain_model(), backend_kwargs={"rank": -3}).fit([data()])


def test_lowrank_kron_refuses_a_backend_without_low_rank_factors():
    with pytest.raises(ValueError, match=r"CurvlinopsGGN.*LowRankKronGGN.*LowRankKronEF"):
        make(plain_model(), backend=CurvlinopsGGN)


@pytest.mark.parametrize("backend", [LowRankKronGGN, LowRankKronEF])
def test_kron_refuses_a_backend_with_low_rank_factors(backend):
    with pytest.raises(ValueError, match=rf"{backend.__name__}.*lowrank_kron"):
        make(plain_model(), "kron", backend=backend)


@pytest.mark.parametrize(
    "settings", [{"last_layer": True}, {"subnetwork_indices": torch.arange(2)}]
)
def test_a_backend_refuses_the_hosts_ways_to_select_weights(settings):
    with pytest.raises(ValueError, match=r"target_modules"):
        LowRankKronGGN(plain_model(), "classification", **settings)


def test_a_state_of_other_weights_is_refused(la):
    la.fit([data()])
    state = la.state_dict()
    with torch.no_grad():
        la.blocks[0].weight.add_(1e-3)
    with pytest.raises(ValueError, match="other LoRA weights"):
        la.load_state_dict(state)
