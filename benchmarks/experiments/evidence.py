"""What a posterior is worth beside a temperature, by runs of `stages`."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.experiments.overview import COUNTS, Keys, keys_of, read_figures
from benchmarks.methods.posteriors import LINK
from benchmarks.options import Evidence
from benchmarks.report import (
    NOTHING,
    Figures,
    Frame,
    Result,
    Row,
    as_frame,
    label,
    records,
    table,
)

MEASURES = (
    "nll",
    "ece",
    "brier",
    "aurc",
    "share_at_realised",
    "shift_nll",
    "shift_ece",
    "auroc",
)
QUEUES = ("share_at_promise", "gap", "share_at_realised")  # see `metrics.queue`
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
# By their keys too: a method may have the name of another, with another prior.
CONTEST = ["keys", "name", "against"]
ALL_TASKS = "mean of the tasks"
ROWS = "evidence.csv"
EXPLAINED = (
    "Differences are a method's figure less that of what it is measured against, of "
    "the same seed and task: below 0 it is better, of AUROC above 0. After ± are "
    "standard errors, over seeds, and of the mean of the tasks over tasks, or by those "
    "of seeds where these are larger. The shift is of texts whose classes are known, "
    "and AUROC, by entropy, of those that have none."
)
QUEUE_EXPLAINED = (
    "Queues decide those texts alone whose mean probability is 0.95, their promise. "
    "The gap is the realised accuracy less the promise: over tasks and seeds in the "
    "mean, and the farthest from 0. The last column is what could be decided alone at "
    "a realised accuracy of 0.95, if the test labels were known."
)


def _temperature(members: int = 1) -> Keys:
    """Return what stages are measured against: their models at a temperature."""
    return Keys(f"staged_map_{members}", "held_out_temperature")


def _penalised(members: int = 1) -> Keys:
    """Return the same at a temperature that the posteriors' own search chooses."""
    return Keys(f"staged_map_{members}", "held_out_penalised")


AFTER_SECOND = Keys("temperature_scaling", "validation_elsewhere")
STAGED = Keys("staged_1", "held_out", LINK)
# What is shown as it is: signs of foreign texts, and NLL by the number of texts.
SHOWN = (
    Keys("map"),
    AFTER_SECOND,
    Keys("lowrank_kron", "validation_elsewhere", LINK),
    *(_temperature(count) for count in COUNTS),
    *(Keys(f"staged_{count}", "held_out", LINK) for count in COUNTS),
)


def rivals_of(keys: Keys) -> Iterator[Keys]:
    """Yield what a method is measured against, of the same texts and trainings."""
    members = re.search(r"^staged_(?:map_)?(\d+)", keys.method)
    count = int(members[1]) if members else 1
    if keys == _temperature(count):
        # More members alone are no merit of a posterior.
        if count > 1:
            yield _temperature()
    elif keys.method == "map" or keys.prior.startswith("validation_elsewhere"):
        if keys != AFTER_SECOND:
            yield AFTER_SECOND
    else:
        yield _temperature(count)
        if keys != _penalised(count):
            yield _penalised(count)


def run(options: Evidence) -> Iterator[Result]:
    """Read the runs, and compare every method with a temperature run by run."""
    rows = read_all(options.runs)
    differences = differences_of(rows)
    if differences.empty:
        raise SystemExit(
            "Nothing is beside a temperature: give folders that `stages` has written."
        )
    of_tasks = averaged(differences, [*TASK, *CONTEST], MEASURES)
    compared = below_their_mean(of_tasks)
    shown = in_order_of_shown(rows)
    # Some tasks have no foreign texts, which an AUROC needs.
    has_foreign = shown["entropy"].notna()
    signs = averaged(shown[has_foreign], [*TASK, "name"], SIGNS)
    sizes = averaged(shown, ["task", "name", "texts_a_class"], ["nll"])
    figures = {
        "differences": records(compared),
        "auroc": records(signs),
        "nll": records(sizes),
        "queues": queues_of(shown),
    }
    of_all = compared["task"] == ALL_TASKS
    of_stages = compared["keys"] == spelt(STAGED)
    per_task = ["against", *TASK]
    parts = [
        EXPLAINED,
        f"The {ALL_TASKS}:",
        table_of(compared[of_all], ["name", "against"], MEASURES, "+.3f"),
        "In stages, each task:",
        table_of(compared[of_stages & ~of_all], per_task, MEASURES, "+.3f"),
        QUEUE_EXPLAINED,
        table(figures["queues"]),
        f"All methods of each task are in {ROWS}.",
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    # What is against nothing is the method's own figure.
    rows_of_all = pd.concat([compared, signs, sizes]).drop(columns="keys")
    rows_of_all.to_csv(options.output / ROWS, index=False, float_format="%.4g")
    yield figures, parts


def below_their_mean(of_tasks: Frame) -> Frame:
    """Put each contest's mean over the tasks above its figures of each task."""
    # Every task counts alike, whatever the number of its seeds.
    of_all = averaged(of_tasks, CONTEST, MEASURES)
    groups = of_tasks.groupby(CONTEST, sort=False)
    for error in (f"{measure}_error" for measure in MEASURES):
        # Tasks that happen to agree would hide how far seeds differ.
        by_seeds = groups[error].agg(
            lambda errors: np.linalg.norm(errors) / len(errors)
        )
        of_all[error] = np.fmax(of_all[error], by_seeds.to_numpy())
    of_all = of_all.assign(task=ALL_TASKS, texts_a_class=None)
    # Stable: within a task contests keep their order.
    by_task = of_tasks.sort_values(TASK, kind="stable")
    # A column of whole numbers can't hold the None of all tasks.
    by_task = by_task.astype({"texts_a_class": object})
    return pd.concat([of_all, by_task])


def in_order_of_shown(rows: Frame) -> Frame:
    """Keep what is shown as it is: in each task in the order of `SHOWN`."""
    places = {spelt(keys): place for place, keys in enumerate(SHOWN)}
    shown = rows[rows["keys"].isin(places)]
    shown = shown.assign(place=shown["keys"].map(places))
    return shown.sort_values(["task", "place", "texts_a_class"], kind="stable")


def spelt(keys: Keys) -> str:
    """Join the keys of a row, since frames compare no tuples."""
    return "/".join(keys)


def read_all(folders: Sequence[Path]) -> Frame:
    """Read a row for each method, task and seed, once: MAP may be in several runs."""
    rows = pd.DataFrame([row for folder in folders for row in read(folder)])
    # What was not measured is None, and in a column of numbers NaN: averages skip it.
    numbers = dict.fromkeys([*MEASURES, *QUEUES, *SIGNS], float)
    return rows.astype(numbers).drop_duplicates([*RUN, "keys"])


def read(folder: Path) -> Iterator[Row]:
    """Read what is compared of a run."""
    figures = read_figures(folder)
    task = figures["task"]
    n_texts = task["train"] / len(task["classes"])
    for row in figures["methods"]:
        sets = list(row["shifted"].values())
        # Only where a class is right there is a loss.
        of_known_classes = [each for each in sets if "nll" in each]
        foreign = [each for each in sets if "nll" not in each]
        aurocs = [each["auroc"] for each in foreign]
        signs = {sign: _mean(aurocs, sign) for sign in SIGNS}
        yield {
            "task": task["name"],
            "texts_a_class": round(n_texts),
            "seed": row["seed"],
            "keys": spelt(keys_of(row)),
            "name": label(row),
            "nll": row["nll"],
            "ece": row["ece"],
            "brier": row["brier"],
            "aurc": row.get("aurc"),
            "shift_nll": _mean(of_known_classes, "nll"),
            "shift_ece": _mean(of_known_classes, "ece"),
            "auroc": _mean(foreign, "shift_auroc"),
            **{name: row.get(name) for name in QUEUES},
            **signs,
        }


def _mean(sets: Sequence[Figures], name: str) -> float | None:
    """Average a figure of several shifted sets; None if none has it."""
    values = [each[name] for each in sets if name in each]
    if not values:
        return None
    return sum(values) / len(values)


def differences_of(rows: Frame) -> Frame:
    """Subtract from each method what it is measured against, by task and seed."""
    parts = []
    contests = [
        (spelling, spelt(rival))
        for spelling in rows["keys"].unique()
        for rival in rivals_of(Keys(*spelling.split("/")))
    ]
    for method, against in contests:
        ours = rows[rows["keys"] == method]
        others = rows[rows["keys"] == against]
        # Seeds differ by more than methods do: differences are taken within each.
        both = ours.merge(others, on=RUN, suffixes=("", "_against"))
        part = both[[*RUN, "keys", "name"]]
        part = part.assign(against=both["name_against"])
        for measure in MEASURES:
            part[measure] = both[measure] - both[f"{measure}_against"]
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def averaged(rows: Frame, identity: Sequence[str], measures: Sequence[str]) -> Frame:
    """Average measures of alike rows, with their standard errors."""
    groups = rows.groupby(list(identity), sort=False)[list(measures)]
    means = groups.mean()
    errors = groups.sem().add_suffix("_error")
    counts = groups.size().rename("count")
    return means.join(errors).join(counts).reset_index()


def table_of(
    averages: Frame, identity: Sequence[str], measures: Sequence[str], style: str
) -> str:
    """Lay out averages, each with its standard error."""
    shown = []
    for row in records(averages):
        cells = {name: row[name] for name in [*identity, "count"]}
        for measure in measures:
            error = row[f"{measure}_error"]
            cells[measure] = _with_error(row[measure], error, style)
        shown.append(cells)
    return table(shown)


def _with_error(mean: float | None, error: float | None, style: str) -> str:
    if mean is None:
        return NOTHING
    written = format(mean, style)
    # One value has no error that anybody knows.
    if error is None:
        return written
    return f"{written} ± {error:.3f}"


def queues_of(rows: Frame) -> list[Row]:
    """Average what methods decide alone, over tasks; of the gap show the worst too."""
    queues = []
    for name, of_method in rows.groupby("name", sort=False):
        of_tasks = of_method.groupby(TASK)[list(QUEUES)].mean()
        means = of_tasks.mean()
        known = of_method["gap"].dropna()
        queues.append(
            {
                "name": name,
                "tasks": len(of_tasks),
                "share_at_promise": means["share_at_promise"],
                "mean_gap": means["gap"],
                "worst_gap": max(known, key=abs, default=None),
                "share_at_realised": means["share_at_realised"],
            }
        )
    return records(as_frame(queues))
