"""What a posterior is worth beside a temperature, over made-up runs."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks.experiments.evidence import AFTER_SECOND, rivals_of
from benchmarks.experiments.overview import Keys
from tests.benchmarks.support import Row, rows_by, rows_with, run, values_of

OURS = "staged_1, held_out, mean_field"
TEMPERED = ("staged_map_1", "held_out_temperature")
PENALISED = ("staged_map_1", "held_out_penalised")


def row(
    method: str, prior: str, seed: int, nll: float, link: str = "", **changes: Any
) -> Row:
    """Make a row of `stages`, with a shifted set of known classes and a foreign one."""
    typos = {"nll": 2 * nll, "ece": 0.2, "shift_auroc": 0.9, "auroc": {"entropy": 0.9}}
    # Their labels are none of the classes, so that there is no loss.
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


def write(
    folder: Path, temperatures: dict[int, float], task: str, train: int, gain: float
) -> Path:
    """Write a run of two classes, given the temperature's NLL by seed.

    MAP's is 1 above it, and the posterior's is below it by the gain, twice for seed 1.
    """
    rows = []
    for seed, nll in temperatures.items():
        better = nll - gain * (1 + seed)
        rows += [
            row("staged_map_1", "", seed, nll + 1),
            row("staged_map_1", "held_out_temperature", seed, nll),
            row("staged_1", "held_out", seed, better, "mean_field"),
            row("a_rival", "", seed, nll + 2),
        ]
    save(rows, folder, task, train)
    return folder


def save(rows: list[Row], folder: Path, task: str = "first", train: int = 20) -> None:
    """Write the figures of a run, as `stages` does."""
    described = {"name": task, "classes": ["a", "b"], "train": train}
    folder.mkdir(exist_ok=True)
    content = json.dumps({"methods": rows, "task": described})
    (folder / "stages.json").write_text(content, encoding="utf-8")


# --- evidence of all runs -------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("evidence")


@pytest.fixture(scope="module")
def finished(folder):
    """The evidence of runs of two tasks, one of them with two numbers of texts."""
    runs = [
        write(folder / "one", {0: 1.0, 1: 5.0}, "first", 20, gain=0.1),
        write(folder / "two", {0: 1.0}, "second", 20, gain=-0.01),
        write(folder / "more", {0: 0.5}, "second", 40, gain=0.0),
        # The same task and seed again, which counts once.
        write(folder / "again", {1: 7.0}, "first", 20, gain=0.3),
    ]
    return run(folder / "out", "evidence", runs=runs)


def test_differences_are_paired_by_task_and_seed(finished):
    ours = rows_with(finished.figures["differences"], name=OURS)
    differences = rows_by(ours, "task", "texts_a_class")
    difference = differences["first", 10]
    # The seeds differ by much more than the method and what it is measured against.
    assert difference["nll"] == pytest.approx(-0.15)
    assert difference["nll_error"] == pytest.approx(0.05)
    assert difference["shift_nll"] == pytest.approx(-0.3)
    assert difference["auroc"] == pytest.approx(-0.015)
    assert difference["count"] == 2
    assert "-0.150 ± 0.050" in finished.printed
    # One seed has no error.
    difference = differences["second", 10]
    assert difference["nll"] == pytest.approx(0.01)
    assert difference["nll_error"] is None
    # Each task counts once in the mean.
    mean = differences["mean of the tasks", None]
    assert mean["nll"] == pytest.approx((-0.15 + 0.01 + 0) / 3)
    assert mean["count"] == 3


def test_a_new_rival_is_measured_against_the_temperature(finished):
    rivals = rows_with(finished.figures["differences"], name="a_rival")
    assert values_of(rivals, "nll") == pytest.approx(4 * [2])
    assert set(values_of(rivals, "against")) == {"staged_map_1, held_out_temperature"}


def test_figures_are_those_of_each_size_and_sign(finished):
    wanted = {"task": "second", "name": OURS, "texts_a_class": 20}
    (size,) = rows_with(finished.figures["nll"], **wanted)
    assert size["nll"] == 0.5
    (signs,) = rows_with(finished.figures["auroc"], **wanted)
    # Those of texts without a class alone.
    assert signs["entropy"] == pytest.approx(0.05)
    assert signs["maximum"] == 0.5
    assert signs["mahalanobis"] is None


def test_queues_are_averaged_over_tasks(tmp_path):
    of_queue = {"share_at_promise": 0.5, "share_at_realised": 0.8}
    for task, gaps in {"first": (0.02, -0.06), "second": (None, 0.01)}.items():
        rows = []
        for seed, gap in enumerate(gaps):
            queue = {**of_queue, "gap": gap}
            rows += [
                row("staged_map_1", "held_out_temperature", seed, 1.0, **queue),
                row("staged_1", "held_out", seed, 1.0, "mean_field", **queue),
            ]
            of_queue = {"share_at_promise": 0.1, "share_at_realised": 0.2}
        save(rows, tmp_path / task, task)
    runs = [tmp_path / "first", tmp_path / "second"]
    finished = run(tmp_path / "out", "evidence", runs=runs)
    (ours,) = rows_with(finished.figures["queues"], name=OURS)
    assert ours["tasks"] == 2
    assert ours["mean_gap"] == pytest.approx((-0.02 + 0.01) / 2)
    assert ours["worst_gap"] == -0.06
    assert ours["share_at_promise"] == pytest.approx((0.3 + 0.1) / 2)
    assert ours["share_at_realised"] == pytest.approx((0.5 + 0.2) / 2)


def test_all_rows_are_in_a_file(finished, folder):
    rows = pd.read_csv(folder / "out" / "evidence.csv")
    tables = [finished.figures[name] for name in ("differences", "auroc", "nll")]
    assert len(rows) == sum(map(len, tables))
    is_ours = (rows["task"] == "first") & (rows["name"] == OURS)
    (ours,) = rows[is_ours & rows["against"].notna()]["nll"]
    assert ours == pytest.approx(-0.15)


@pytest.mark.parametrize(
    ("keys", "rivals"),
    [
        (("map",), [AFTER_SECOND]),
        (AFTER_SECOND, []),
        (("second_mixture", "validation_elsewhere"), [AFTER_SECOND]),
        (TEMPERED, []),
        (("staged_map_2", "held_out_temperature"), [TEMPERED]),
        (("staged_2_student", "swapped"), [("staged_map_2", "held_out_temperature")]),
        (("staged_kron", "held_out"), [TEMPERED, PENALISED]),
        (("label_smoothing", "held_out"), [TEMPERED, PENALISED]),
        (PENALISED, [TEMPERED]),
    ],
)
def test_each_has_the_rival_of_the_same_texts_and_members(keys, rivals):
    assert list(rivals_of(Keys(*keys))) == [Keys(*rival) for rival in rivals]


# --- runs that give less --------------------------------------------------------------


def test_runs_without_a_temperature_are_refused(tmp_path):
    save([row("staged_1", "held_out", 0, 1.0)], tmp_path / "one")
    with pytest.raises(SystemExit, match="folders that `stages`"):
        run(tmp_path / "out", "evidence", runs=[tmp_path / "one"])
