"""What a posterior is worth beside a temperature, over made-up runs."""

import json

import pytest

from tests.benchmarks.support import run


def row(
    method,
    prior,
    seed,
    nll,
    link="",
    **changes,
):
    """Make a row of `stages`, with a shifted set of known classes and a foreign one."""
    typos = {"nll": 2 * nll, "ece": 0.2, "shift_auroc": 0.9, "auroc": {"entropy": 0.9}}
    foreign = {"shift_auroc": nll / 10, "auroc": {"entropy": nll / 10, "maximum": 0.5}}
    return {
        "method": method,
        "name": method,
        "prior": prior,
        "chosen_by": prior,
        "link": link,
        "seed": seed,
        "nll": nll,
        "ece": nll / 5,
        "brier": 0.5,
        "aurc": 0.1,
        "shifted": {"typos": typos, "oos": foreign},
    } | changes


def written(folder, task, train, temperatures, gain):
    """Write a run of two classes, given the temperature's NLL by seed.

    MAP's is 1 above it.
    """
    rows = []
    for seed, nll in temperatures.items():
        rows.append(row("staged_map_1", "", seed, nll + 1))
        rows.append(row("staged_map_1", "held_out_temperature", seed, nll, chosen=2.0))
        rows.append(
            row("staged_1", "held_out", seed, nll - gain * (1 + seed), "mean_field")
        )
        rows.append(row("unheard_of", "", seed, 99.0))
    folder.mkdir()
    figures = {
        "methods": rows,
        "task": {"name": task, "classes": ["a", "b"], "train": train},
    }
    (folder / "stages.json").write_text(json.dumps(figures), encoding="utf-8")
    return folder


def test_paired_differences_and_goals_by_task(tmp_path, capsys):
    folders = [
        written(tmp_path / "one", "first", 20, {0: 1.0, 1: 5.0}, gain=0.1),
        written(tmp_path / "two", "second", 20, {0: 1.0}, gain=-0.01),
        written(tmp_path / "more", "second", 40, {0: 0.5}, gain=0.0),
        written(tmp_path / "again", "first", 20, {1: 7.0}, gain=0.3),  # counts once
    ]
    finished = run(capsys, tmp_path / "out", "evidence", runs=folders)
    figures = finished.figures
    ours = "staged_1, held_out, mean_field"
    found = {
        (each["task"], each["texts_a_class"]): each
        for each in figures["differences"]
        if each["name"] == ours
    }
    first = found["first", 10]
    # The seeds differ by much more than the method and what it is measured against.
    assert first["nll"] == pytest.approx(-0.15)
    assert first["nll_error"] == pytest.approx(0.05)
    assert first["shift_nll"] == pytest.approx(-0.3)
    assert first["auroc"] == pytest.approx(-0.015)
    assert first["count"] == 2
    assert found["second", 10]["nll"] == pytest.approx(0.01)
    assert found["second", 10]["nll_error"] is None
    of_all = found["mean of the tasks", None]
    assert of_all["nll"] == pytest.approx((-0.15 + 0.01 + 0) / 3)
    assert of_all["count"] == 3
    assert not any("unheard_of" in each["name"] for each in figures["differences"])
    goals = {each["name"]: each for each in figures["goals"]}
    assert goals[ours]["tasks"] == 3
    assert goals[ours]["nll_not_behind"] == 2
    assert goals[ours]["ece_not_behind"] == 3
    assert goals[ours]["overconfident"] == 3
    assert goals[ours]["lower_where_overconfident"] == pytest.approx(0.14 / 3)
    assert goals[ours]["lower_under_a_shift"] == pytest.approx(0.28 / 3)
    assert goals["staged_map_1"]["nll_not_behind"] == 0
    sizes = {
        (each["task"], each["name"], each["texts_a_class"]): each
        for each in figures["nll"]
    }
    assert sizes["second", ours, 20]["nll"] == 0.5
    signs = {
        (each["task"], each["name"], each["texts_a_class"]): each
        for each in figures["auroc"]
    }
    # Those of texts without a class alone.
    assert signs["second", ours, 20]["entropy"] == pytest.approx(0.05)
    assert signs["second", ours, 20]["maximum"] == 0.5
    assert signs["second", ours, 20]["mahalanobis"] is None
    assert "-0.150 ± 0.050" in finished.printed


@pytest.mark.parametrize(("place", "change"), [(0, {"ece": 0.0}), (1, {"chosen": 0.5})])
def test_a_task_whose_model_is_less_sure_than_right_is_no_gain(
    tmp_path, capsys, place, change
):
    # MAP's ECE is below the temperature's, or a temperature below 1 lowers it.
    folder = written(tmp_path / "one", "first", 20, {0: 3.0}, gain=0.1)
    figures = json.loads((folder / "stages.json").read_text(encoding="utf-8"))
    figures["methods"][place] |= change
    (folder / "stages.json").write_text(json.dumps(figures), encoding="utf-8")
    goals = run(capsys, tmp_path / "out", "evidence", runs=[folder]).figures["goals"]
    (ours,) = (
        each for each in goals if each["name"] == "staged_1, held_out, mean_field"
    )
    assert ours["overconfident"] == 0
    assert ours["lower_where_overconfident"] is None


def test_runs_without_a_temperature_are_refused(tmp_path, capsys):
    folder = written(tmp_path / "one", "first", 20, {0: 3.0}, gain=0.1)
    figures = json.loads((folder / "stages.json").read_text(encoding="utf-8"))
    del figures["methods"][1]
    (folder / "stages.json").write_text(json.dumps(figures), encoding="utf-8")
    with pytest.raises(SystemExit, match="folders that `stages`"):
        run(capsys, tmp_path / "out", "evidence", runs=[folder])
