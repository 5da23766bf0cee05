"""The experiment on fidelity at its smallest, and its parts on cases with known answers."""

import math
import warnings

import pytest
import torch
from torch import nn

from benchmarks.experiments import fidelity_models
from benchmarks.experiments.curvature_errors import (
    DenseCurvature,
    errors,
    evidence_prior_precision,
    jacobians,
    kilobytes_kept,
)
from benchmarks.experiments.fidelity import DEFAULTS, all_curvatures, means, on_front
from benchmarks.methods import posterior
from benchmarks.models import AdaptedModel
from tests.benchmarks.support import is_picture, run
from tests.support.models import lora_model, ragged_batches

EXACT = {"rtol": 1e-9, "atol": 1e-12}
ERRORS = (
    "block_error",
    "covariance_error",
    "full_covariance_error",
    "log_det_error",
    "log_det_relative_error",
)
RATIOS = ("trace_ratio", "covariance_trace_ratio")


def test_the_benchmark_writes_tables_figures_and_plot(tmp_path, capsys):
    sizes = {"base_examples": 20, "train_examples": 15, "test_examples": 5, "epochs": 3}
    models = {"hidden_size": 16, "ranks": 2, "files_per_library": 40, "seeds": 0}
    folder = tmp_path / "results"
    options = {**sizes, **models, "cache": tmp_path / "cache"}
    figures, printed, _ = run(capsys, folder, "fidelity", "--quiet", **options)
    assert is_picture(folder / "fidelity.png")
    names = [method.title for method, _ in all_curvatures([2], 16)]
    assert len(names) == 3 * (2 * 2 + 1) + 2
    assert [row["name"] for row in figures["means"]] == names
    assert all(name in printed for name in names)
    assert len(figures["curvatures"]) == 3 * len(names)
    for model in figures["models"]:
        assert model["weights"] == 8 * 4 * 16
        assert 0 < model["prior_precision"] < 1e6
    for row in figures["curvatures"]:
        assert all(math.isfinite(row[key]) for key in (*ERRORS, *RATIOS))
        assert 0 < row["own_prior_precision_ratio"] < 1e6
        has_tail = row["kfac_approx"] == "gradient" and row["tail"]
        if has_tail or row["structure"] == "diag":
            assert row["trace_ratio"] == pytest.approx(1, abs=1e-6)
        if row["structure"] == "diag":
            assert row["kilobytes"] == 8 * 4 * 16 * 4 / 1000


def linear_softmax() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """A linear model, inputs, and its exact GGN, in closed form."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3, bias=False).double(), torch.randn(6, 4).double()
    p = layer(x).detach().softmax(-1)
    fisher = p.diag_embed() - torch.einsum("nc,nk->nck", p, p)
    ggn = sum(torch.kron(H, torch.outer(a, a)) for H, a in zip(fisher, x, strict=True))
    return layer, x, torch.as_tensor(ggn)


def test_jacobians_and_curvature_of_a_linear_softmax_are_known():
    layer, x, ggn = linear_softmax()
    Js, logits = jacobians(layer, [layer.weight], x.split(1))
    expected = torch.stack([torch.kron(torch.eye(3).double(), a) for a in x])
    torch.testing.assert_close(Js, expected, **EXACT)
    torch.testing.assert_close(logits, layer(x).detach(), **EXACT)
    full = DenseCurvature.of_softmax(Js, logits, [12])
    torch.testing.assert_close(full.blocks[0], ggn, **EXACT)
    by_class = DenseCurvature.of_softmax(Js, logits, [4, 8])
    torch.testing.assert_close(by_class.blocks[0], ggn[:4, :4], **EXACT)
    torch.testing.assert_close(by_class.blocks[1], ggn[4:, 4:], **EXACT)


def test_covariance_and_log_determinant_are_those_of_the_dense_inverse():
    layer, x, ggn = linear_softmax()
    Js, logits = jacobians(layer, [layer.weight], x.split(1))
    curvature = DenseCurvature.of_softmax(Js, logits, [4, 8])
    P = torch.block_diag(ggn[:4, :4], ggn[4:, 4:]) + 0.3 * torch.eye(12).double()
    covariance = Js @ torch.linalg.inv(P) @ Js.mT
    torch.testing.assert_close(curvature.covariance(Js, 0.3), covariance, **EXACT)
    assert curvature.log_det(0.3) == pytest.approx(P.logdet().item())


def test_the_evidence_of_an_isotropic_curvature_has_a_known_maximum():
    """With H = e I over P weights, the derivative vanishes where λ² + e λ = P e / ‖w‖²."""
    e, weights = 7.0, torch.linspace(-1, 2, 10).double()
    blocks = [e * torch.eye(4).double(), e * torch.eye(6).double()]
    product = 10 * e / weights.square().sum().item()
    expected = -e / 2 + math.sqrt(e**2 / 4 + product)
    found = evidence_prior_precision(DenseCurvature(blocks), weights)
    assert found == pytest.approx(expected, rel=1e-4)


def test_the_exact_curvature_has_no_errors_and_a_doubled_one_has():
    layer, x, ggn = linear_softmax()
    Js, _ = jacobians(layer, [layer.weight], x.split(1))
    exact = DenseCurvature([ggn])
    known = (exact, exact.covariance(Js, 0.5), Js, 0.5)
    figures = errors(exact, *known)
    assert all(figures[key] == 0 for key in ERRORS)
    assert all(figures[key] == 1 for key in RATIOS)
    # (2 H + 2 λ)⁻¹ is half of (H + λ)⁻¹, and its log-determinant P log 2 larger.
    doubled = DenseCurvature([2 * ggn + 0.5 * torch.eye(12)])
    figures = errors(doubled, *known)
    assert figures["covariance_error"] == pytest.approx(0.5)
    assert figures["full_covariance_error"] == pytest.approx(0.5)
    assert figures["covariance_trace_ratio"] == pytest.approx(0.5)
    assert figures["log_det_error"] == pytest.approx(math.log(2))
    gained = exact.log_det(0.5) - 12 * math.log(0.5)
    assert figures["log_det_relative_error"] == pytest.approx(12 * math.log(2) / gained)
    figures = errors(DenseCurvature([2 * ggn]), *known)
    assert figures["block_error"] == pytest.approx(1)
    assert figures["trace_ratio"] == pytest.approx(2)


def fitted(method, model, batches):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The posterior is over lora_A and lora_B")
        la = method.build(model)
        la.fit(batches)
    return la


def test_the_gradient_form_is_exact_for_one_example_of_one_token_and_two_classes():
    """Its Fisher has rank one, and so have the gradients of the weights."""
    model = AdaptedModel(lora_model("bert", n_labels=2).eval())
    batch = ragged_batches(lengths=[1], batch_size=1, padded_to=1, n_classes=2)[0]
    weights = model.lora_weights
    sizes = [weight.numel() for weight in weights]
    Js, logits = jacobians(model.logits_model, weights, [batch])
    curvature = DenseCurvature.of_softmax(Js, logits, sizes)
    precision = 0.1 * max(block.trace().item() for block in curvature.blocks)
    known = (curvature, curvature.covariance(Js, precision), Js, precision)
    figures, chosen = {}, {}
    for method, _ in all_curvatures([2], 12):
        if method.title in ("gradient, rank 2", "Stock diag"):
            la = fitted(method, model, [batch])
            la.optimize_prior_precision(method="marglik")
            chosen[method.title] = la.prior_precision.item()
            figures[method.title] = errors(DenseCurvature.of_fit(la.H, sizes), *known)
    for key in ERRORS:
        assert figures["gradient, rank 2"][key] == pytest.approx(0, abs=1e-6)
        assert figures["Stock diag"][key] > 1e-3
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    own = chosen["gradient, rank 2"]
    assert own == pytest.approx(evidence_prior_precision(curvature, flat), rel=0.02)


def test_the_memory_kept_is_that_of_the_factors():
    expected = {
        "gradient, rank 2, tail": (2 * 2 + 2 + 1) + (12 * 2 + 2 + 1),
        "Stock Kron": (2 * 2 + 2) + (12 * 12 + 12),
        "Stock diag": 2 * 12,
    }
    for method, _ in all_curvatures([2], 12):
        if method.title in expected:
            la = fitted(method, AdaptedModel(lora_model("bert")), ragged_batches())
            assert kilobytes_kept(la.H) == pytest.approx(8 * expected[method.title] * 4 / 1000)


def test_the_default_is_the_librarys_and_is_always_among_the_curvatures():
    defaults = [settings for _, settings in all_curvatures([3], 12) if settings == DEFAULTS]
    assert len(defaults) == 1
    la = fitted(posterior("lowrank_kron"), AdaptedModel(lora_model("bert")), ragged_batches())
    assert la.backend.rank == DEFAULTS["rank"]
    assert la.backend.tail == DEFAULTS["tail"]


def test_padding_is_no_part_of_the_mean():
    torch.manual_seed(0)
    config = fidelity_models.transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=30,
    )
    model = fidelity_models.MeanPooledDecoder(config).eval()
    tokens = torch.tensor([[4, 8, 15, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    padded = model({"input_ids": tokens, "attention_mask": mask})
    bare = model({"input_ids": tokens[:, :3], "attention_mask": mask[:, :3]})
    torch.testing.assert_close(padded, bare)


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([(1.0, 5.0), (2.0, 3.0), (3.0, 4.0), (4.0, 1.0)], [0, 1, 3]),
        ([(2.0, 1.0), (1.0, 1.0)], [1]),
        ([(1.0, 2.0), (1.0, 1.0), (1.0, 1.0)], [1, 2]),
        ([(3.0, 1.0), (1.0, 3.0)], [0, 1]),
    ],
)
def test_the_front_of_a_known_list(points, front):
    assert [place for place, best in enumerate(on_front(points)) if best] == front


def judged(ours, rival, stock, memory=(10.0, 10.0, 200.0)):
    """Means by name, of covariance errors of two seeds of model a, and of one of model b."""
    kinds = {
        "ours": {"structure": "lowrank_kron", "is_default": True, **DEFAULTS},
        "rival": {"structure": "lowrank_kron", "is_default": False, **DEFAULTS, "rank": 4},
        "stock": {"structure": "kron", "is_default": False, **dict.fromkeys(DEFAULTS)},
    }
    rows = [
        {"name": name, **kind, "model": model, "kilobytes": kept, "covariance_error": error}
        for (name, kind), of_kind, kept in zip(
            kinds.items(), (ours, rival, stock), memory, strict=True
        )
        for model, error in zip("aab", of_kind, strict=True)
    ]
    return {row["name"]: row for row in means(rows)}


def test_means_compare_a_curvature_with_the_default_and_with_stock_kron():
    good = judged(ours=(0.05, 0.04, 0.10), rival=(0.02, 0.03, 0.2), stock=(0.3, 0.3, 0.2))
    assert list(good) == ["ours", "rival", "stock"]
    assert good["ours"]["covariance_error"] == pytest.approx(0.19 / 3)
    assert good["ours"]["worst_covariance_error"] == 0.10
    assert good["ours"]["share_of_stock_kron"] == pytest.approx(0.05)
    assert good["ours"]["below_stock_kron"]
    assert good["ours"]["on_front"]
    assert not good["rival"]["below_default"]
    assert good["stock"]["rank"] is None

    beaten = judged(ours=(0.04, 0.11, 0.05), rival=(0.02, 0.1, 0.04), stock=(0.3, 0.1, 0.2))
    assert beaten["ours"]["worst_covariance_error"] == 0.11
    assert not beaten["ours"]["below_stock_kron"]
    assert not beaten["ours"]["on_front"]
    assert beaten["rival"]["below_default"]
