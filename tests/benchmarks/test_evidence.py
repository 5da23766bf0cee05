"""What a posterior is worth beside a temperature, over made-up runs."""

import json

import pandas as pd
import pytest

from tests.benchmarks.support import rows_by, rows_with, run, values_of

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
    # Their labels are none of the classes, so that there is no loss.
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


def write(
    folder,
    task,
    train,
    temperatures,
    gain,
):
    """Write a run of two classes, given the temperature's NLL by seed.

    MAP's is 1 above it, and the posterior's is below it by the gain, twice for seed 1.
    """
    rows = []
    for seed, nll in temperatures.items():
        of_model = row(
            method="staged_map_1",
            prior="",
            seed=seed,
            nll=nll + 1,
        )
        of_temperature = row(
            method="staged_map_1",
            prior="held_out_temperature",
            seed=seed,
            nll=nll,
            chosen=2.0,
        )
        of_posterior = row(
            method="staged_1",
            prior="held_out",
            seed=seed,
            nll=nll - gain * (1 + seed),
            link="mean_field",
        )
        of_none = row(
            method="unheard_of",
            prior="",
            seed=seed,
            nll=99.0,
        )
        rows += [of_model, of_temperature, of_posterior, of_none]
    figures = {
        "methods": rows,
        "task": {"name": task, "classes": ["a", "b"], "train": train},
    }
    folder.mkdir()
    save(figures, folder)
    return folder


def save(figures, folder):
    """Write the figures of a run, as `stages` does."""
    file = folder / "stages.json"
    file.write_text(json.dumps(figures), encoding="utf-8")


# --- evidence of all runs -------------------------------------------------------------


@pytest.fixture
def finished(tmp_path):
    """The evidence of runs of two tasks, one of them with two numbers of texts."""
    first = write(
        tmp_path / "one",
        "first",
        train=20,
        temperatures={0: 1.0, 1: 5.0},
        gain=0.1,
    )
    second = write(
        tmp_path / "two",
        "second",
        train=20,
        temperatures={0: 1.0},
        gain=-0.01,
    )
    of_more_texts = write(
        tmp_path / "more",
        "second",
        train=40,
        temperatures={0: 0.5},
        gain=0.0,
    )
    # The same task and seed again, which counts once.
    first_again = write(
        tmp_path / "again",
        "first",
        train=20,
        temperatures={1: 7.0},
        gain=0.3,
    )
    runs = [first, second, of_more_texts, first_again]
    return run(tmp_path / "out", "evidence", runs=runs)


@pytest.fixture
def figures(finished):
    return finished.figures


@pytest.fixture
def differences(figures):
    """Ours from the temperature, by task and number of texts a class."""
    ours = rows_with(figures["differences"], name=OURS)
    return rows_by(ours, "task", "texts_a_class")


def test_differences_are_paired_by_task_and_seed(differences, finished):
    difference = differences["first", 10]
    # The seeds differ by much more than the method and what it is measured against.
    assert difference["nll"] == pytest.approx(-0.15)
    assert difference["nll_error"] == pytest.approx(0.05)
    assert difference["shift_nll"] == pytest.approx(-0.3)
    assert difference["auroc"] == pytest.approx(-0.015)
    assert difference["count"] == 2
    assert "-0.150 ± 0.050" in finished.printed


def test_the_difference_of_one_seed_has_no_error(differences):
    difference = differences["second", 10]
    assert difference["nll"] == pytest.approx(0.01)
    assert difference["nll_error"] is None


def test_each_task_counts_once_in_the_mean(differences):
    of_tasks = [-0.15, 0.01, 0]
    mean = differences["mean of the tasks", None]
    assert mean["nll"] == pytest.approx(sum(of_tasks) / 3)
    assert mean["count"] == 3


def test_methods_that_are_not_measured_against_are_left_out(figures):
    names = values_of(figures["differences"], "name")
    assert "unheard_of" not in " ".join(names)


def test_goals_count_tasks(figures):
    (ours,) = rows_with(figures["goals"], name=OURS)
    # The second counts with each number of texts.
    assert ours["tasks"] == 3
    # The gain of one task is negative.
    assert ours["nll_not_behind"] == 2
    assert ours["ece_not_behind"] == 3
    assert ours["overconfident"] == 3
    assert ours["lower_where_overconfident"] == pytest.approx(0.14 / 3)
    assert ours["lower_under_a_shift"] == pytest.approx(0.28 / 3)
    (of_map,) = rows_with(figures["goals"], name="staged_map_1")
    assert of_map["nll_not_behind"] == 0


def test_figures_are_those_of_each_size_and_sign(figures):
    wanted = {
        "task": "second",
        "name": OURS,
        "texts_a_class": 20,
    }
    (size,) = rows_with(figures["nll"], **wanted)
    assert size["nll"] == 0.5
    (signs,) = rows_with(figures["auroc"], **wanted)
    # Those of texts without a class alone.
    assert signs["entropy"] == pytest.approx(0.05)
    assert signs["maximum"] == 0.5
    assert signs["mahalanobis"] is None


def test_all_rows_are_in_a_file(finished, figures, tmp_path):
    rows = pd.read_csv(tmp_path / "out" / "evidence.csv")
    assert len(rows) == sum(
        len(figures[name]) for name in ("differences", "auroc", "nll")
    )
    (ours,) = rows[
        (rows["task"] == "first") & (rows["name"] == OURS) & rows["against"].notna()
    ]["nll"]
    assert ours == pytest.approx(-0.15)


# --- runs that give less --------------------------------------------------------------


@pytest.fixture
def one_run(tmp_path):
    return write(
        tmp_path / "one",
        "first",
        train=20,
        temperatures={0: 3.0},
        gain=0.1,
    )


def change(folder, edit):
    """Edit the rows of a run."""
    file = folder / "stages.json"
    figures = json.loads(file.read_text(encoding="utf-8"))
    edit(figures["methods"])
    save(figures, folder)


def lower_the_models_ece(rows):
    rows[0]["ece"] = 0.0


def choose_a_temperature_below_1(rows):
    rows[1]["chosen"] = 0.5


def leave_the_temperature_out(rows):
    del rows[1]


@pytest.mark.parametrize(
    "edit",
    [
        lower_the_models_ece,
        choose_a_temperature_below_1,
    ],
)
def test_a_task_whose_model_is_less_sure_than_right_is_no_gain(
    edit,
    one_run,
    tmp_path,
):
    change(one_run, edit)
    finished = run(tmp_path / "out", "evidence", runs=[one_run])
    (ours,) = rows_with(finished.figures["goals"], name=OURS)
    assert ours["overconfident"] == 0
    assert ours["lower_where_overconfident"] is None


def test_runs_without_a_temperature_are_refused(one_run, tmp_path):
    change(one_run, leave_the_temperature_out)
    with pytest.raises(SystemExit, match="folders that `stages`"):
        run(tmp_path / "out", "evidence", runs=[one_run])
