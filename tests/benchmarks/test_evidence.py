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


def save(rows: list[Row], folder: Path, task: str = "first", train: int = 20) -> Path:
    """Write the figures of a run of two classes, as `stages` does."""
    described = {"name": task, "classes": ["a", "b"], "train": train}
    folder.mkdir()
    content = json.dumps({"methods": rows, "task": described})
    (folder / "stages.json").write_text(content, encoding="utf-8")
    return folder


def rows_of_seed(
    seed: int, nll: float, gain: float, gap: float | None, share: float = 0.1
) -> list[Row]:
    """Make rows, given the temperature's NLL; the posterior's is below by the gain."""
    queue = {"gap": gap, "share_at_promise": share, "share_at_realised": 2 * share}
    return [
        row("staged_map_1", "", seed, nll + 1),
        row("staged_map_1", "held_out_temperature", seed, nll),
        row("staged_1", "held_out", seed, nll - gain, "mean_field", **queue),
        row("a_rival", "", seed, nll + 2),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("evidence")


@pytest.fixture(scope="module")
def finished(folder):
    """The evidence of runs of two tasks, one of them with two numbers of texts."""
    first = rows_of_seed(0, 1.0, 0.1, gap=0.02, share=0.4)
    first += rows_of_seed(1, 5.0, 0.2, gap=-0.06)
    second = rows_of_seed(0, 1.0, -0.01, gap=None)
    runs = [
        save(first, folder / "one"),
        save(second, folder / "two", "second"),
        save(rows_of_seed(0, 0.5, 0.0, gap=0.01), folder / "more", "second", 40),
        # The same task and seed again, which counts once.
        save(rows_of_seed(1, 7.0, 0.6, gap=0.3), folder / "again"),
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
    # A rival that nobody has named is measured against the temperature.
    rivals = rows_with(finished.figures["differences"], name="a_rival")
    assert values_of(rivals, "nll") == pytest.approx(4 * [2])


def test_figures_are_those_of_each_size_and_sign_and_all_are_in_a_file(
    finished, folder
):
    wanted = {"task": "second", "name": OURS, "texts_a_class": 20}
    (size,) = rows_with(finished.figures["nll"], **wanted)
    assert size["nll"] == 0.5
    (signs,) = rows_with(finished.figures["auroc"], **wanted)
    # Those of texts without a class alone.
    assert signs["entropy"] == pytest.approx(0.05)
    assert signs["maximum"] == 0.5
    assert signs["mahalanobis"] is None
    rows = pd.read_csv(folder / "out" / "evidence.csv")
    tables = [finished.figures[name] for name in ("differences", "auroc", "nll")]
    assert len(rows) == sum(map(len, tables))


def test_queues_are_averaged_over_tasks(finished):
    (ours,) = rows_with(finished.figures["queues"], name=OURS)
    assert ours["tasks"] == 3
    # One task has decided none alone.
    assert ours["mean_gap"] == pytest.approx((-0.02 + 0.01) / 2)
    assert ours["worst_gap"] == -0.06
    assert ours["share_at_promise"] == pytest.approx((0.25 + 0.1 + 0.1) / 3)
    assert ours["share_at_realised"] == pytest.approx((0.5 + 0.2 + 0.2) / 3)


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
        (PENALISED, [TEMPERED]),
    ],
)
def test_each_has_the_rival_of_the_same_texts_and_members(keys, rivals):
    assert list(rivals_of(Keys(*keys))) == [Keys(*rival) for rival in rivals]


def test_runs_without_a_temperature_are_refused(tmp_path):
    save([row("staged_1", "held_out", 0, 1.0)], tmp_path / "one")
    with pytest.raises(SystemExit, match="folders that `stages`"):
        run(tmp_path / "out", "evidence", runs=[tmp_path / "one"])
