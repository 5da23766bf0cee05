"""One table and one figure over the calibration of several tasks."""

import json

import pytest

from tests.benchmarks.support import is_picture, run

ROW = {
    **{"name": "MAP", "prior": "", "chosen_by": "", "link": "", "accuracy": 0.7, "ece": 0.1},
    **{"regret": None, "fit_seconds": 1.0, "predict_seconds": 2.0, "forward_passes": 1.0},
}


def written(folder, task: str, losses: dict[int, float], kind: str = "calibration"):
    """A run of two methods on a task."""
    rows = []
    for seed, nll in losses.items():
        rows.append({**ROW, "seed": seed, "method": "map", "nll": nll})
        chosen = {"method": "lowrank_kron", "name": "lowrank_kron", "link": "mean_field"}
        chosen |= {"prior": "agreement", "chosen_by": "agreement"}
        ours = {**ROW, "seed": seed, **chosen, "nll": max(1.0, nll / 2), "regret": nll}
        rows += [ours, {**ours, "link": "mc", "nll": 99.0}]
    folder.mkdir()
    figures = {"methods": rows, "task": {"name": task}}
    (folder / f"{kind}.json").write_text(json.dumps(figures), encoding="utf-8")
    return folder


def test_means_over_seeds_and_tasks_of_the_methods_that_are_shown(tmp_path, capsys):
    folders = [
        written(tmp_path / "one", "first", {0: 1.0, 1: 3.0}),
        written(tmp_path / "two", "second", {0: 4.0, 1: 4.0}),
        written(tmp_path / "again", "first", {1: 3.0}, "stages"),  # counts once
    ]
    options = {"runs": folders, "ours": "lowrank_kron, agreement, mean_field"}
    figures, report, _ = run(capsys, tmp_path / "out", "overview", **options)
    of_tasks = {(row["task"], row["name"]): row["nll"] for row in figures["tasks"]}
    ours = options["ours"]
    assert of_tasks == pytest.approx(
        {("first", "MAP"): 2, ("first", ours): 1.25, ("second", "MAP"): 4, ("second", ours): 2}
    )
    assert {row["name"]: row["nll"] for row in figures["all"]} == {"MAP": 3, ours: 1.625}
    assert {row["name"]: row["regret"] for row in figures["all"]} == {"MAP": None, ours: 3}
    assert "second, seeds 0, 1:" in report
    against = {row["name"]: row for row in figures["against"]}
    counts = {"runs": 4, "lower_nll": 3, "lower_ece": 0}  # one NLL and every ECE is the same
    assert {key: against["MAP"][key] for key in counts} == counts
    assert against["MAP"]["regret"] is None
    assert against[ours]["regret"] == "1.000 to 4.000"
    assert against["MAP"]["fit_seconds"] == "1.000 to 1.000"
    assert is_picture(tmp_path / "out" / "overview.png")
    assert is_picture(tmp_path / "out" / "costs.png")
