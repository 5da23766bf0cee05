"""One table and one figure over the calibration of several tasks."""

import json

import pytest

from tests.benchmarks.support import is_picture, run

MAP = {
    "method": "map",
    "name": "MAP",
    "prior": "",
    "chosen_by": "",
    "link": "",
    "accuracy": 0.7,
    "ece": 0.1,
    "regret": None,
    "fit_seconds": 1.0,
    "predict_seconds": 2.0,
    "forward_passes": 1.0,
}
OURS = {
    **MAP,
    "method": "lowrank_kron",
    "name": "lowrank_kron",
    "prior": "agreement",
    "chosen_by": "agreement",
    "link": "mean_field",
}


def written(
    folder,
    task: str,
    losses: dict[int, float],
    kind: str = "calibration",
):
    """Write a run of MAP, with an NLL for each seed, and of ours with half of it."""
    rows = []
    for seed, nll in losses.items():
        ours = {**OURS, "seed": seed, "nll": max(1.0, nll / 2), "regret": nll}
        rows.append({**MAP, "seed": seed, "nll": nll})
        rows.append(ours)
        # A link that overviews don't show.
        rows.append({**ours, "link": "mc", "nll": 99.0})
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
    ours = "lowrank_kron, agreement, mean_field"
    finished = run(capsys, tmp_path / "out", "overview", runs=folders, ours=ours)
    figures = finished.figures
    of_tasks = {(row["task"], row["name"]): row["nll"] for row in figures["tasks"]}
    assert of_tasks == pytest.approx(
        {
            ("first", "MAP"): 2,
            ("first", ours): 1.25,
            ("second", "MAP"): 4,
            ("second", ours): 2,
        }
    )
    of_map, of_ours = figures["all"]
    assert of_map["name"] == "MAP"
    assert of_map["nll"] == 3
    assert of_map["regret"] is None
    assert of_ours["name"] == ours
    assert of_ours["nll"] == 1.625
    assert of_ours["regret"] == 3
    assert "second, seeds 0, 1:" in finished.printed
    against = {row["name"]: row for row in figures["against"]}
    assert against["MAP"]["runs"] == 4
    assert against["MAP"]["lower_nll"] == 3  # one is the same
    assert against["MAP"]["lower_ece"] == 0  # all are the same
    assert against["MAP"]["regret"] is None
    assert against[ours]["regret"] == "1.000 to 4.000"
    assert against["MAP"]["fit_seconds"] == "1.000 to 1.000"
    assert is_picture(tmp_path / "out" / "overview.png")
    assert is_picture(tmp_path / "out" / "costs.png")
