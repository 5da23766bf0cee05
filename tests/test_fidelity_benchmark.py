"""The fidelity benchmark at its smallest, and its parts on cases with known answers."""

import json
import math
import warnings

import pytest
import torch
from torch import nn

from benchmarks import fidelity, fidelity_models
from benchmarks.__main__ import build_parser
from benchmarks.exact_curvature import DenseCurvature, evidence_prior_precision, jacobians
from benchmarks.fidelity_contestants import (
    DEFAULTS,
    Contestant,
    all_contestants,
    approximate_posterior,
    errors,
    exact_posterior,
    fitted,
    numbers_kept,
)
from benchmarks.fidelity_report import means, pareto_front, sentences, verdict
from laplace_lora_ext.models.logits_model import LogitsModel
from tests.support.models import lora_model, ragged_batches

EXACT = {"rtol": 1e-9, "atol": 1e-12}
ERRORS = (
    "block_error",
    "covariance_error",
    "full_covariance_error",
    "log_det_error",
    "log_det_relative_error",
)
RATIOS = ("trace_ratio", "covariance_trace_ratio", "own_prior_precision_ratio")


def test_the_benchmark_writes_tables_figures_and_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fidelity, "FILES_PER_LIBRARY", 40)
    output = tmp_path / "results"
    sizes = "--hidden-size 16 --ranks 2 --base-examples 20 --train-examples 15 --test-examples 5"
    options = ["fidelity", *sizes.split(), "--seeds", "0", "--epochs", "3", "--quiet"]
    arguments = build_parser().parse_args([*options, "--output", str(output)])
    figures = fidelity.fidelity(arguments)
    printed = capsys.readouterr().out
    assert json.loads((output / "fidelity.json").read_text()) == json.loads(json.dumps(figures))
    assert (output / "fidelity.md").read_text().strip() == printed.strip()
    assert (output / "fidelity.png").read_bytes().startswith(b"\x89PNG")
    names = [contestant.name for contestant in all_contestants([2], 16)]
    assert len(names) == 3 * (2 * 2 + 1) + 2
    assert [row["name"] for row in figures["means"]] == names
    assert len(figures["curvatures"]) == 3 * len(names)
    assert figures["verdict"]["default"] in printed
    for model in figures["models"]:
        assert model["weights"] == 8 * 4 * 16
        assert 0 < model["prior_precision"] < 1e6
    for row in figures["curvatures"]:
        assert all(math.isfinite(row[key]) for key in (*ERRORS, *RATIOS))
        if row["name"].startswith("gradient") and "tail" in row["name"]:
            assert row["trace_ratio"] == pytest.approx(1, abs=1e-6)
        if row["name"] == "stock diag":
            assert row["trace_ratio"] == pytest.approx(1, abs=1e-6)
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
    exact = exact_posterior(DenseCurvature([ggn]), Js, 0.5)
    figures = errors(exact, exact, exact.covariance, 0.5)
    assert all(figures[key] == 0 for key in ERRORS)
    assert all(figures[key] == 1 for key in RATIOS)
    assert figures["kilobytes"] == 12 * 12 * 4 / 1000
    # (2 H + 2 λ)⁻¹ is half of (H + λ)⁻¹, and its log-determinant P log 2 larger.
    doubled = exact_posterior(DenseCurvature([2 * ggn + 0.5 * torch.eye(12)]), Js, 0.5)
    figures = errors(doubled, exact, exact.covariance, 0.5)
    assert figures["covariance_error"] == pytest.approx(0.5)
    assert figures["full_covariance_error"] == pytest.approx(0.5)
    assert figures["covariance_trace_ratio"] == pytest.approx(0.5)
    assert figures["log_det_error"] == pytest.approx(math.log(2))
    gained = DenseCurvature([ggn]).log_det(0.5) - 12 * math.log(0.5)
    assert figures["log_det_relative_error"] == pytest.approx(12 * math.log(2) / gained)
    twice = exact_posterior(DenseCurvature([2 * ggn]), Js, 0.5)
    figures = errors(twice, exact, exact.covariance, 0.5)
    assert figures["block_error"] == pytest.approx(1)
    assert figures["trace_ratio"] == pytest.approx(2)


def test_the_gradient_form_is_exact_for_one_example_of_one_token_and_two_classes():
    """Its Fisher has rank one, and so have the gradients of the weights."""
    model = LogitsModel(lora_model("bert", n_labels=2))
    batch = ragged_batches(lengths=[1], batch_size=1, padded_to=1, n_classes=2)[0]
    weights = [p for name, p in model.named_parameters() if "lora_" in name]
    sizes = [weight.numel() for weight in weights]
    with model.prepared(weights):
        Js, logits = jacobians(model, weights, [batch])
    curvature = DenseCurvature.of_softmax(Js, logits, sizes)
    precision = 0.1 * max(block.trace().item() for block in curvature.blocks)
    exact = exact_posterior(curvature, Js, precision)
    contestants = {each.name: each for each in all_contestants([2], 12)}
    figures = {}
    for name in ("gradient, rank 2", "stock diag"):
        la = _fitted(contestants[name], model, [batch])
        posterior = approximate_posterior(la, sizes, Js, precision)
        figures[name] = errors(posterior, exact, exact.covariance, precision)
    for key in ERRORS:
        assert figures["gradient, rank 2"][key] == pytest.approx(0, abs=1e-6)
        assert figures["stock diag"][key] > 1e-3
    chosen = evidence_prior_precision(
        curvature, torch.cat([weight.detach().flatten() for weight in weights])
    )
    own = precision * figures["gradient, rank 2"]["own_prior_precision_ratio"]
    assert own == pytest.approx(chosen, rel=0.02)


def test_numbers_kept_are_those_of_the_factors():
    model = LogitsModel(lora_model("bert"))
    batches = ragged_batches()
    expected = {
        "gradient, rank 2, tail": (2 * 2 + 2 + 1) + (12 * 2 + 2 + 1),
        "stock Kron": (2 * 2 + 2) + (12 * 12 + 12),
        "stock diag": 2 * 12,
    }
    for contestant in all_contestants([2], 12):
        if contestant.name in expected:
            kept = numbers_kept(_fitted(contestant, model, batches).H)
            assert kept == 8 * expected[contestant.name]


def test_the_default_is_the_librarys_and_is_always_among_the_contestants():
    defaults = [each for each in all_contestants([3], 12) if each.is_default]
    assert [each.settings for each in defaults] == [DEFAULTS]
    la = _fitted(
        Contestant("no settings", "lowrank_kron", {}),
        LogitsModel(lora_model("bert")),
        ragged_batches(),
    )
    assert la.backend.rank == DEFAULTS["rank"]
    assert la.backend.tail == DEFAULTS["tail"]


def test_padding_is_no_part_of_the_mean():
    torch.manual_seed(0)
    config = fidelity_models.LlamaConfig(
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
        ([(3.0, 1.0), (1.0, 3.0)], [1, 0]),
    ],
)
def test_the_front_of_a_known_list(points, front):
    assert pareto_front(points) == front


RIVAL = Contestant("rival", "lowrank_kron", {**DEFAULTS, "kfac_approx": "reduce"})
DEFAULT = Contestant("ours", "lowrank_kron", DEFAULTS)
STOCK = Contestant("stock", "kron", {})


def judged(ours, rival, stock, memory=(10.0, 10.0, 200.0)):
    """The verdict on covariance errors: of two seeds of model a, and of one of model b."""
    contestants = [DEFAULT, RIVAL, STOCK]
    rows = [
        {"model": model, "name": each.name, "kilobytes": kept, "covariance_error": error}
        for each, errors, kept in zip(contestants, (ours, rival, stock), memory, strict=True)
        for model, error in zip("aab", errors, strict=True)
    ]
    return verdict(rows, contestants, means(rows, contestants))


def test_the_verdict_on_known_errors():
    good = judged(ours=(0.05, 0.04, 0.10), rival=(0.02, 0.03, 0.2), stock=(0.3, 0.3, 0.2))
    assert good["meets_error"]
    assert good["meets_stock_kron"]
    assert good["on_front"]
    assert good["better"] == []
    assert good["memory_share"] == pytest.approx(0.05)
    assert good["errors"] == {"a": [0.05, 0.04], "b": [0.10]}
    assert "MISSED" not in sentences(good)

    beaten = judged(ours=(0.04, 0.11, 0.05), rival=(0.02, 0.1, 0.04), stock=(0.3, 0.1, 0.2))
    assert not beaten["meets_error"]
    assert not beaten["meets_stock_kron"]
    assert not beaten["on_front"]
    assert beaten["better"] == ["rival"]
    assert sentences(beaten).count("MISSED") == 2
    assert "NOT on the front" in sentences(beaten)

    large = judged(
        ours=(0.04, 0.04, 0.1),
        rival=(0.02, 0.02, 0.05),
        stock=(0.3, 0.3, 0.2),
        memory=(20.0, 21.0, 200.0),
    )
    assert not large["meets_stock_kron"]
    assert large["better"] == []


def test_means_are_those_of_each_contestant():
    rows = [
        {"name": name, "kilobytes": 1.0, "covariance_error": error}
        for name, error in [("ours", 1.0), ("rival", 5.0), ("ours", 2.0)]
    ]
    averages = means(rows, [RIVAL, DEFAULT])
    assert [row["name"] for row in averages] == ["rival", "ours"]
    assert [row["covariance_error"] for row in averages] == [5.0, 1.5]
    assert [row["on_front"] for row in averages] == ["", "yes"]


def _fitted(contestant, model, batches):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The posterior is over lora_A and lora_B")
        return fitted(contestant, model, batches)
