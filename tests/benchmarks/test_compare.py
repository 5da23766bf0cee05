"""The main job and the experiment on tuning at their smallest."""

import pytest

from benchmarks.experiments.compare import RECIPE, Line, lines_of
from tests.benchmarks.support import is_picture, parsed, run

SIZES = {"train_examples": 15, "validation_examples": 10, "test_examples": 10, "epochs": 1}
SMALL = {**SIZES, "shifted_examples": 6, "files_per_library": 40, "samples": 100}


def test_the_main_job_writes_table_figures_and_diagram(tmp_path, capsys):
    folder = tmp_path / "results"
    figures, printed, progress = run(capsys, folder, "", cache=tmp_path / "cache", **SMALL)
    rows = figures["methods"]
    assert [row["label"] for row in rows] == [
        "MAP",
        "Temperature scaling",
        "Stock diag, evidence, layerwise, probit",
        "Stock Kron, evidence, layerwise, probit",
        "lowrank_kron (paper), evidence, layerwise, probit",
        "lowrank_kron, agreement, mean_field",
    ]
    for row in rows:
        assert row["label"] in printed
        assert 0 < row["nll"] < 10
        assert row["fit_seconds"] >= 0 < row["predict_seconds"]
    assert rows[0]["accuracy"] == rows[1]["accuracy"]
    assert rows[1]["chosen"]["temperature"] > 0
    assert len(rows[-1]["chosen"]["prior_precision"]) == 1
    assert (folder / "table.md").read_text().count("\n| ") == len(rows) + 1
    assert is_picture(folder / "reliability.png")
    assert figures["data"]["shifted"] == {"matplotlib": 6}
    assert "Training" in progress


def test_a_task_without_shifted_texts_is_measured_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.experiments.compare.lines_of", lambda _: [Line("map"), RECIPE])
    own = {
        "task": "submodules",
        "train_examples": 24,
        "test_examples": 12,
        "files_per_library": 300,
    }
    options = {**SMALL, **own, "seed": 1, "cache": tmp_path / "cache"}
    figures, printed, _ = run(capsys, tmp_path / "results", "", "--quiet", **options)
    assert "shifted texts: none" in printed
    assert figures["data"]["shifted"] == {}
    for row in figures["methods"]:
        assert 0 < row["nll"] < 10
        assert "shift_auroc" not in row


def test_rows_follow_the_options():
    assert lines_of(parsed(""))[-1] == RECIPE
    settings = [
        (line.method, line.prior, line.link) for line in lines_of(parsed("--every-row"))[4:]
    ]
    assert settings == [
        ("lowrank_kron_paper", "marglik_layerwise", "probit"),
        ("lowrank_kron", "marglik_layerwise", "probit"),
        ("lowrank_kron_paper", "marglik_scalar", "mc"),
        ("lowrank_kron", "marglik_scalar", "mc"),
        ("lowrank_kron", "agreement", "mean_field"),
    ]


def test_the_tuning_benchmark_writes_tables_figures_and_plots(tmp_path, capsys):
    searches = {"grid_size": 5, "stock_grid_size": 1, "steps": 20}
    folder = tmp_path / "results"
    options = {"cache": tmp_path / "cache", **SMALL, **searches}
    figures, printed, _ = run(capsys, folder, "tuning", "--quiet", **options)
    for row in (*figures["costs"], *figures["choices"]):
        assert row["name"] in printed
    for cost in figures["costs"]:
        assert cost["seconds"] > 0
    assert len({row["name"] for row in figures["choices"]}) == 2 + 3 * 3 + 1
    for choice in figures["choices"]:
        for link in ("probit", "mc", "mean_field"):
            assert 0 < choice[f"{link}_nll"] < 10
    assert sum(figures["variance_by_layer"].values()) == pytest.approx(1)
    for plot in ("tuning.png", "variance_by_layer.png"):
        assert is_picture(folder / plot)
