"""What a posterior is worth beside a temperature, over made-up runs."""

import json

import pytest

from tests.benchmarks.support import rows_by, rows_with, run

OURS = "staged_1, held_out, mean_field"


def row(
    method,
    prior,
    seed,
    nll,
    link="",
    **changes,
):
    """Make a row of `stages`, with a shifted set of known classes and a foreign one."""
    typos = {
        "nll": 2 * nll,
        "ece": 0.2,
        "shift_auroc": 0.9,
        "auroc": {"entropy": 0.9},
    }
    foreign = {
        "shift_auroc": nll / 10,
        "auroc": {"entropy": nll / 10, "maximum": 0.5},
    }
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


def write(folder, task, train, temperatures, gain):
    """Write a run of two classes, given the temperature's NLL by seed.

    MAP's is 1 above it, and the posterior's is below it by the gain, twice for seed 1.
    """
    rows = []
    for seed, nll in temperatures.items():
        of_posterior = nll - gain * (1 + seed)
        rows += [
            row("staged_map_1", "", seed, nll + 1),
            row("staged_map_1", "held_out_temperature", seed, nll, chosen=2.0),
            row("staged_1", "held_out", seed, of_posterior, "mean_field"),
            row("unheard_of", "", seed, 99.0),
        ]
    figures = {
        "methods": rows,
        "task": {"name": task, "classes": ["a", "b"], "train": train},
    }
    folder.mkdir()
    (folder / "stages.json").write_text(json.dumps(figures), encoding="utf-8")
    return folder


@pytest.fixture
def figures(tmp_path, capsys):
    """The evidence of runs of two tasks, one of them with two numbers of texts."""
    folders = [
        write(tmp_path / "one", "first", 20, {0: 1.0, 1: 5.0}, gain=0.1),
        write(tmp_path / "two", "second", 20, {0: 1.0}, gain=-0.01),
        write(tmp_path / "more", "second", 40, {0: 0.5}, gain=0.0),
        # The same task and seed again, which counts once.
        write(tmp_path / "again", "first", 20, {1: 7.0}, gain=0.3),
    ]
    finished = run(capsys, tmp_path / "out", "evidence", runs=folders)
    assert "-0.150 ± 0.050" in finished.printed
    return finished.figures


def test_differences_are_paired_by_task_and_seed(figures):
    ours = rows_with(figures["differences"], name=OURS)
    found = rows_by(ours, "task", "texts_a_class")
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
    for difference in figures["differences"]:
        assert "unheard_of" not in difference["name"]


def test_goals_count_tasks(figures):
    (ours,) = rows_with(figures["goals"], name=OURS)
    assert ours["tasks"] == 3
    assert ours["nll_not_behind"] == 2
    assert ours["ece_not_behind"] == 3
    assert ours["overconfident"] == 3
    assert ours["lower_where_overconfident"] == pytest.approx(0.14 / 3)
    assert ours["lower_under_a_shift"] == pytest.approx(0.28 / 3)
    (of_map,) = rows_with(figures["goals"], name="staged_map_1")
    assert of_map["nll_not_behind"] == 0


def test_figures_are_those_of_each_size_and_sign(figures):
    wanted = {"task": "second", "name": OURS, "texts_a_class": 20}
    (size,) = rows_with(figures["nll"], **wanted)
    assert size["nll"] == 0.5
    (signs,) = rows_with(figures["auroc"], **wanted)
    # Those of texts without a class alone.
    assert signs["entropy"] == pytest.approx(0.05)
    assert signs["maximum"] == 0.5
    assert signs["mahalanobis"] is None


@pytest.fixture
def one_run(tmp_path):
    return write(tmp_path / "one", "first", 20, {0: 3.0}, gain=0.1)


def change(folder, edit):
    """Edit the rows of a run."""
    file = folder / "stages.json"
    figures = json.loads(file.read_text(encoding="utf-8"))
    edit(figures["methods"])
    file.write_text(json.dumps(figures), encoding="utf-8")


def lower_the_models_ece(rows):
    rows[0]["ece"] = 0.0


def choose_a_temperature_below_1(rows):
    rows[1]["chosen"] = 0.5


def leave_the_temperature_out(rows):
    del rows[1]


@pytest.mark.parametrize("edit", [lower_the_models_ece, choose_a_temperature_below_1])
def test_a_task_whose_model_is_less_sure_than_right_is_no_gain(
    edit,
    one_run,
    tmp_path,
    capsys,
):
    change(one_run, edit)
    finished = run(capsys, tmp_path / "out", "evidence", runs=[one_run])
    (ours,) = rows_with(finished.figures["goals"], name=OURS)
    assert ours["overconfident"] == 0
    assert ours["lower_where_overconfident"] is None


def test_runs_without_a_temperature_are_refused(one_run, tmp_path, capsys):
    change(one_run, leave_the_temperature_out)
    with pytest.raises(SystemExit, match="folders that `stages`"):
        run(capsys, tmp_path / "out", "evidence", runs=[one_run])
