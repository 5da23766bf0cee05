"""What a posterior is worth beside a temperature, by runs of `stages`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from benchmarks.experiments.overview import COUNTS, Keys, keys_of, read_figures
from benchmarks.options import Evidence
from benchmarks.report import (
    NOTHING,
    Figures,
    Frame,
    Result,
    Row,
    label,
    records,
    table,
)

LINK = "mean_field"
MEASURES = ("nll", "ece", "brier", "aurc", "shift_nll", "shift_ece", "auroc")
SIGNS = (
    "entropy",
    "maximum",
    "epistemic_entropy",
    "summed_variance",
    "largest_variance",
    "mahalanobis",
)
RUN = ["task", "texts_a_class", "seed"]
TASK = ["task", "texts_a_class"]  # trained on other numbers of texts, it is another
CONTEST = ["keys", "name", "against"]
ALL_TASKS = "mean of the tasks"
NLL_BEHIND = 0.005  # that a method may be, on any task
ECE_BEHIND = 0.01
EXPLAINED = (
    "Differences are a method's figure less that of what it is measured against, of "
    "the same seed and task: below 0 it is better, of AUROC above 0. After ± are "
    "standard errors, over seeds, and of the mean of the tasks over tasks. The shift "
    "is of texts whose classes are known, and AUROC, by entropy, of those that have "
    "none."
)
GOALS = (
    f"On how many tasks NLL and ECE are at most {NLL_BEHIND} and {ECE_BEHIND} behind, "
    "and by how much the NLL is lower in the mean: where the trained model is "
    "overconfident, so that a temperature above 1 lowers its ECE (the goal is 0.03), "
    "and under a shift (0.05)."
)


class Contest(NamedTuple):
    """A method, and what it is measured against."""

    method: Keys
    against: Keys


def _temperature(members: int) -> Keys:
    """Return what stages are measured against: their models at a temperature."""
    return Keys(f"staged_map_{members}", "held_out_temperature")


AFTER_SECOND = Keys("temperature_scaling", "validation_elsewhere")
SECOND = Keys("lowrank_kron", "validation_elsewhere", LINK)
SECOND_HEAD = Keys("lowrank_kron_head", "validation_elsewhere", LINK)
STAGED_MAP = Keys("staged_map_1")
STAGED = Keys("staged_1", "held_out", LINK)
STAGED_HEAD = Keys("staged_1_head", "held_out", LINK)


def _tempered(keys: Keys) -> Keys:
    """Return the same method after a temperature."""
    return keys._replace(prior=f"{keys.prior}_tempered")


def _contests() -> Iterator[Contest]:
    """Yield all contests, in the order of the tables."""
    yield Contest(Keys("map"), AFTER_SECOND)
    for keys in (SECOND, SECOND_HEAD):
        yield Contest(keys, AFTER_SECOND)
        yield Contest(_tempered(keys), AFTER_SECOND)
    yield Contest(SECOND_HEAD, SECOND)
    yield Contest(Keys("second_mixture", "validation_elsewhere", LINK), AFTER_SECOND)
    yield Contest(STAGED_MAP, _temperature(1))
    yield Contest(Keys("label_smoothing", "held_out"), _temperature(1))
    alone = Keys("staged_1", "held_out_prior", LINK)
    for keys in (alone, STAGED, STAGED_HEAD):
        yield Contest(keys, _temperature(1))
        yield Contest(_tempered(keys), _temperature(1))
    yield Contest(STAGED_HEAD, STAGED)
    for taught_by in ("training_texts", "swapped"):
        yield Contest(Keys("staged_1_amortized", taught_by, LINK), _temperature(1))
        yield Contest(Keys("staged_1_student", taught_by), _temperature(1))
    yield Contest(Keys("staged_map_1_student", "swapped"), _temperature(1))
    for count in COUNTS[1:]:
        yield Contest(_temperature(count), _temperature(1))
        mixture = Keys(f"staged_{count}", "held_out", LINK)
        for keys in (mixture, _tempered(mixture)):
            yield Contest(keys, _temperature(count))
        yield Contest(
            Keys(f"staged_{count}_amortized", "swapped", LINK), _temperature(count)
        )
        yield Contest(Keys(f"staged_{count}_student", "swapped"), _temperature(count))


CONTESTS = tuple(_contests())
# What is shown as it is: signs of foreign texts, and NLL by the number of texts.
SHOWN = (
    Keys("map"),
    SECOND,
    _temperature(1),
    STAGED,
    STAGED_HEAD,
    *(_temperature(count) for count in COUNTS[1:]),
    *(Keys(f"staged_{count}", "held_out", LINK) for count in COUNTS[1:]),
)


def run(options: Evidence) -> Iterator[Result]:
    """Read the runs, and compare every method with a temperature run by run."""
    rows = read_all(options.runs)
    differences = differences_of(rows)
    if differences.empty:
        raise SystemExit(
            "Nothing is beside a temperature: give folders that `stages` has written."
        )
    of_tasks = averaged(differences, [*TASK, *CONTEST], MEASURES)
    of_all = averaged(of_tasks, CONTEST, MEASURES).assign(
        task=ALL_TASKS, texts_a_class=None
    )
    by_task = of_tasks.sort_values(TASK, kind="stable").astype(
        {"texts_a_class": object}
    )
    compared = pd.concat([of_all, by_task])
    goals = goals_of(of_tasks, overconfident_tasks(rows))
    order = {spelt(keys): place for place, keys in enumerate(SHOWN)}
    shown = rows[rows["keys"].isin(order)]
    shown = shown.assign(place=shown["keys"].map(order))
    shown = shown.sort_values(["task", "place", "texts_a_class"], kind="stable")
    signs = averaged(shown[shown["entropy"].notna()], [*TASK, "name"], SIGNS)
    sizes = averaged(shown, ["task", "name", "texts_a_class"], ["nll"])
    figures = {
        "differences": records(compared),
        "goals": goals,
        "auroc": records(signs),
        "nll": records(sizes),
    }
    parts = [
        EXPLAINED,
        table_of(compared, [*TASK, "name", "against"], MEASURES, "+.3f"),
        GOALS,
        table(goals),
        "AUROC of foreign texts, by all that tells of them:",
        table_of(signs, [*TASK, "name"], SIGNS, ".3f"),
        "NLL by the number of training texts of a class:",
        table_of(sizes, ["task", "name", "texts_a_class"], ["nll"], ".3f"),
    ]
    yield figures, parts


def spelt(keys: Keys) -> str:
    """Join the keys of a row, since frames compare no tuples."""
    return "/".join(keys)


def read_all(folders: Sequence[Path]) -> Frame:
    """Read a row for each method, task and seed, once: MAP may be in several runs."""
    rows = pd.DataFrame([row for folder in folders for row in read(folder)])
    # What was not measured is no number.
    numbers = dict.fromkeys(["chosen", *MEASURES, *SIGNS], float)
    return rows.astype(numbers).drop_duplicates([*RUN, "keys"])


def read(folder: Path) -> Iterator[Row]:
    """Read what is compared of a run."""
    figures = read_figures(folder)
    task = figures["task"]
    for row in figures["methods"]:
        sets = list(row["shifted"].values())
        of_known_classes = [each for each in sets if "nll" in each]
        foreign = [each for each in sets if "nll" not in each]
        yield {
            "task": task["name"],
            "texts_a_class": round(task["train"] / len(task["classes"])),
            "seed": row["seed"],
            "keys": spelt(keys_of(row)),
            "name": label(row),
            "chosen": row.get("chosen"),
            "nll": row["nll"],
            "ece": row["ece"],
            "brier": row["brier"],
            "aurc": row.get("aurc"),
            "shift_nll": _mean(of_known_classes, "nll"),
            "shift_ece": _mean(of_known_classes, "ece"),
            "auroc": _mean(foreign, "shift_auroc"),
            **{
                sign: _mean([each["auroc"] for each in foreign], sign) for sign in SIGNS
            },
        }


def _mean(
    sets: Sequence[Figures],
    name: str,
) -> float | None:
    """Average a figure of several shifted sets; None if none has it."""
    values = [each[name] for each in sets if name in each]
    return sum(values) / len(values) if values else None


def differences_of(rows: Frame) -> Frame:
    """Subtract from each method what it is measured against, by task and seed."""
    parts = []
    for method, against in CONTESTS:
        ours = rows[rows["keys"] == spelt(method)]
        others = rows[rows["keys"] == spelt(against)]
        both = ours.merge(others, on=RUN, suffixes=("", "_against"))
        part = both[[*RUN, "keys", "name"]].assign(against=both["name_against"])
        for measure in MEASURES:
            part[measure] = both[measure] - both[f"{measure}_against"]
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def averaged(
    rows: Frame,
    identity: Sequence[str],
    measures: Sequence[str],
) -> Frame:
    """Average measures of alike rows, with their standard errors."""
    groups = rows.groupby(list(identity), sort=False)[list(measures)]
    errors = groups.sem().add_suffix("_error")
    return groups.mean().join(errors).join(groups.size().rename("count")).reset_index()


def table_of(
    averages: Frame,
    identity: Sequence[str],
    measures: Sequence[str],
    style: str,
) -> str:
    """Lay out averages, each with its standard error."""
    shown = []
    for row in records(averages):
        cells = {name: row[name] for name in [*identity, "count"]}
        for measure in measures:
            cells[measure] = _with_error(row[measure], row[f"{measure}_error"], style)
        shown.append(cells)
    return table(shown)


def _with_error(
    mean: float | None,
    error: float | None,
    style: str,
) -> str:
    if mean is None:
        return NOTHING
    # One value has no error that anybody knows.
    return format(mean, style) if error is None else f"{mean:{style}} ± {error:.3f}"


def overconfident_tasks(rows: Frame) -> pd.MultiIndex:
    """Find the tasks whose trained model is surer than it is right.

    A temperature above 1 then lowers its ECE. Where a model is less sure than right,
    one below 1 does, and no variance can.
    """
    of_keys = {
        keys: rows[rows["keys"] == spelt(keys)].groupby(TASK)[["ece", "chosen"]].mean()
        for keys in (STAGED_MAP, _temperature(1))
    }
    both = of_keys[STAGED_MAP].join(of_keys[_temperature(1)], rsuffix="_tempered")
    is_lower = both["ece_tempered"] < both["ece"]
    return both[is_lower & (both["chosen_tempered"] > 1)].index


def goals_of(
    of_tasks: Frame,
    overconfident: pd.MultiIndex,
) -> list[Row]:
    """Count each contest's tasks where it is not behind, and average its gains."""
    goals = []
    for (_, name, against), rows in of_tasks.groupby(CONTEST, sort=False):
        is_overconfident = pd.MultiIndex.from_frame(rows[TASK]).isin(overconfident)
        where_overconfident = rows["nll"][is_overconfident]
        under_shift = rows["shift_nll"].dropna()
        goals.append(
            {
                "name": name,
                "against": against,
                "tasks": len(rows),
                "nll_not_behind": int((rows["nll"] <= NLL_BEHIND).sum()),
                "ece_not_behind": int((rows["ece"] <= ECE_BEHIND).sum()),
                "overconfident": len(where_overconfident),
                "lower_where_overconfident": _gain(where_overconfident),
                "shifted": len(under_shift),
                "lower_under_a_shift": _gain(under_shift),
            }
        )
    return goals


def _gain(differences: Frame) -> float | None:
    """Average by how much something is lower."""
    return None if differences.empty else -float(differences.mean())
