"""What a posterior is worth beside a temperature, over made-up runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments.evidence import AFTER_SECOND, rivals_of
from benchmarks.experiments.overview import Keys
from tests.benchmarks.support import Row, rows_by, rows_with, run

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
        "ece": 0.3,
        "brier": 0.5,
        "shifted": {"typos": typos, "oos": foreign},
    } | changes


def save(
    folder: Path,
    seeds: dict[int, tuple[float, float]],
    task: str = "first",
    train: int = 20,
    gaps: tuple[float | None, ...] = (0.01,),
) -> None:
    """Write a run of two classes, as `stages` does.

    Of each seed is given the temperature's NLL, and by how much the posterior's is
    below.
    """
    rows = []
    for (seed, (nll, gain)), gap in zip(seeds.items(), gaps, strict=True):
        share = 0.1 + 0.3 * seed
        queue = {"gap": gap, "share_at_promise": share, "share_at_realised": 2 * share}
        rows += [
            row("staged_map_1", "", seed, nll + 1),
            row(*TEMPERED, seed, nll),
            row("staged_1", "held_out", seed, nll - gain, "mean_field", **queue),
            row("a_rival", "", seed, nll + 2),
        ]
    described = {"name": task, "classes": ["a", "b"], "train": train}
    folder.mkdir()
    content = json.dumps({"methods": rows, "task": described})
    (folder / "stages.json").write_text(content, encoding="utf-8")


def test_differences_are_paired_and_means_are_of_tasks(tmp_path):
    """Two tasks, one of them with two numbers of texts."""
    one, two, more, again = (tmp_path / name for name in ("1", "2", "3", "4"))
    save(one, {0: (1.0, 0.1), 1: (5.0, 0.2)}, gaps=(0.02, -0.06))
    save(two, {0: (1.0, -0.01)}, "second", gaps=(None,))
    save(more, {0: (0.5, 0.0)}, "second", train=40)
    # The same task and seed again, which counts once.
    save(again, {1: (7.0, 0.6)}, gaps=(0.3,))
    figures = run(f"evidence --runs {one} {two} {more} {again}", tmp_path / "out")

    ours = rows_with(figures["differences"], name=OURS)
    differences = rows_by(ours, "task", "texts_a_class")
    difference = differences["first", 10]
    # The seeds differ by much more than the method and what it is measured against.
    assert difference["nll"] == pytest.approx(-0.15)
    assert difference["nll_error"] == pytest.approx(0.05)
    assert difference["shift_nll"] == pytest.approx(-0.3)
    assert difference["auroc"] == pytest.approx(-0.015)
    assert difference["count"] == 2
    (table,) = (tmp_path / "out").glob("*.md")
    assert "-0.150 ± 0.050" in table.read_text(encoding="utf-8")
    # One seed has no error.
    difference = differences["second", 10]
    assert difference["nll"] == pytest.approx(0.01)
    assert difference["nll_error"] is None
    # Each task counts once in the mean.
    mean = differences["mean of the tasks", None]
    assert mean["nll"] == pytest.approx((-0.15 + 0.01 + 0) / 3)
    assert mean["count"] == 3
    # A rival that nobody has named is measured against the temperature.
    rivals = rows_with(figures["differences"], name="a_rival")
    assert [rival["nll"] for rival in rivals] == pytest.approx(4 * [2])

    wanted = {"task": "second", "name": OURS, "texts_a_class": 20}
    (size,) = rows_with(figures["nll"], **wanted)
    assert size["nll"] == 0.5
    (signs,) = rows_with(figures["auroc"], **wanted)
    # Those of texts without a class alone.
    assert signs["entropy"] == pytest.approx(0.05)
    assert signs["maximum"] == 0.5
    assert signs["mahalanobis"] is None

    (queue,) = rows_with(figures["queues"], name=OURS)
    assert queue["tasks"] == 3
    # One task has decided none alone.
    assert queue["mean_gap"] == pytest.approx((-0.02 + 0.01) / 2)
    assert queue["worst_gap"] == -0.06
    assert queue["share_at_promise"] == pytest.approx((0.25 + 0.1 + 0.1) / 3)
    assert queue["share_at_realised"] == pytest.approx((0.5 + 0.2 + 0.2) / 3)


def test_tasks_that_agree_hide_no_error_of_seeds(tmp_path):
    for task in ("first", "second"):
        seeds = {0: (1.0, 0.1), 1: (5.0, 0.2)}
        save(tmp_path / task, seeds, task, gaps=(None, None))
    folders = f"{tmp_path / 'first'} {tmp_path / 'second'}"
    figures = run(f"evidence --runs {folders}", tmp_path / "out")
    ours = rows_with(figures["differences"], name=OURS)
    mean = rows_by(ours, "task")["mean of the tasks",]
    assert mean["nll_error"] == pytest.approx(0.05 / 2**0.5)


@pytest.mark.parametrize(
    ("keys", "rivals"),
    [
        (("map",), [AFTER_SECOND]),
        (AFTER_SECOND, []),
        (("second_mixture", "validation_elsewhere"), [AFTER_SECOND]),
        (TEMPERED, []),
        (("staged_map_2", "held_out_temperature"), [TEMPERED]),
        (
            ("staged_2_student", "swapped"),
            [
                ("staged_map_2", "held_out_temperature"),
                ("staged_map_2", "held_out_penalised"),
            ],
        ),
        (("staged_kron", "held_out"), [TEMPERED, PENALISED]),
        (PENALISED, [TEMPERED]),
    ],
)
def test_each_has_the_rival_of_the_same_texts_and_members(keys, rivals):
    assert list(rivals_of(Keys(*keys))) == [Keys(*rival) for rival in rivals]
