"""One table over the calibration of several tasks."""

import json

from tests.benchmarks.support import rows_by, rows_with, run

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
}
OF_OURS = {
    "method": "lowrank_kron",
    "name": "lowrank_kron",
    "prior": "agreement",
    "chosen_by": "agreement",
    "link": "mean_field",
}
OURS = "lowrank_kron, agreement, mean_field"


def write(folder, task: str, losses: list[float], file: str = "calibration.json"):
    """Write a run of MAP, with an NLL for each seed, and of ours with half of it.

    Ours is 1 at least.
    """
    rows = []
    for seed, nll in enumerate(losses):
        of_map = MAP | {"seed": seed, "nll": nll}
        ours = of_map | OF_OURS | {"nll": max(1.0, nll / 2), "regret": nll}
        # A link that overviews don't show.
        rows += [of_map, ours, ours | {"link": "mc", "nll": 99.0}]
    folder.mkdir()
    content = json.dumps({"methods": rows, "task": {"name": task, "train": 40}})
    (folder / file).write_text(content, encoding="utf-8")


def test_means_over_seeds_and_tasks_of_the_methods_that_are_shown(tmp_path):
    write(tmp_path / "one", "first", [1.0, 3.0])
    write(tmp_path / "two", "second", [4.0, 4.0])
    write(tmp_path / "again", "first", [9.0], "stages.json")  # counts once
    folders = f"{tmp_path}/one {tmp_path}/two {tmp_path}/again"
    figures = run(f"overview --runs {folders} --ours '{OURS}'", tmp_path / "out")
    of_tasks = rows_by(figures["tasks"], "task", "name")
    nll = {keys: row["nll"] for keys, row in of_tasks.items()}
    assert nll == {
        ("first", "MAP"): 2,
        ("first", OURS): 1.25,
        ("second", "MAP"): 4,
        ("second", OURS): 2,
    }
    # Means of the tasks, each of which is a mean of its seeds.
    of_map, of_ours = figures["all"]
    assert (of_map["name"], of_map["nll"], of_map["regret"]) == ("MAP", 3, None)
    assert (of_ours["name"], of_ours["nll"], of_ours["regret"]) == (OURS, 1.625, 3)
    (against_map,) = rows_with(figures["against"], name="MAP")
    (itself,) = rows_with(figures["against"], name=OURS)
    assert against_map["runs"] == 4
    assert against_map["lower_nll"] == 3  # one is the same
    assert against_map["median_nll_difference"] == -1.75
    assert against_map["highest_nll_difference"] == 0  # where they are the same
    assert against_map["nll_difference"] == -1.375  # of -0.75 and -2
    assert against_map["nll_difference_error"] == 0.625
    assert against_map["lower_ece"] == 0  # all are the same
    assert against_map["fit_seconds"] == "1.000 to 1.000"
    assert itself["regret"] == "1.000 to 4.000"
