"""Settings of rivals that train again, compared by held-out texts."""

from collections.abc import Iterator

from benchmarks.fine_tuning import Pretrained, fine_tune, prepare
from benchmarks.held_out import HELD, held_out
from benchmarks.methods.method import Members, labels_of
from benchmarks.methods.settings import SETTINGS
from benchmarks.options import Settings
from benchmarks.report import Result, Row, as_frame, over_seeds, say, table
from laplace_lora_ext.metrics import quality

TRAINED = "maximum likelihood"
FIGURES = ("accuracy", "nll", "ece")
# Of what the trained model gets right, a rival may lose less than two texts in 100.
# What has hardly trained has a low NLL too.
MOST_LOST = 0.02


def run(options: Settings) -> Iterator[Result]:
    """Train each seed's model and its rivals, and report after each of them."""
    unknown = set(options.rivals) - SETTINGS.keys()
    if unknown:
        raise SystemExit(
            f"No settings of {unknown.pop()!r}; there are those of {list(SETTINGS)}."
        )
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepare(options, seed)
        for row in measured(pretrained, options, seed):
            rows.append(row)
            figures = {"task": pretrained.description, "rows": rows}
            yield figures, text_of(pretrained, rows)


def measured(
    pretrained: Pretrained,
    options: Settings,
    seed: int,
) -> Iterator[Row]:
    """Train without a fifth of the texts by each recipe, and predict that fifth.

    Test texts choose nothing: the tables of methods are measured on them.
    """
    rest, held = held_out(pretrained)
    labels = labels_of(held)
    loaders = {HELD: pretrained.prediction_loader(held)}
    batches = pretrained.loader(rest)
    model = fine_tune(pretrained, rest, seed)

    def row(rival: str, name: str, members: Members) -> Row:
        predicted = members.predict(loaders)
        figures = quality(predicted[HELD], labels)
        return {"seed": seed, "rival": rival, "settings": name, **figures}

    yield row(TRAINED, TRAINED, Members.of([model]))
    for rival in options.rivals:
        tried = SETTINGS[rival]
        for recipe in tried.recipes:
            say(options, f"Seed {seed}: {recipe.name}")
            yield row(rival, recipe.name, tried.fit(recipe, model, batches))


def text_of(pretrained: Pretrained, rows: list[Row]) -> list[str]:
    """Put the rows in words and a table."""
    task = pretrained.description
    words = (
        f"Task {task['name']}: a fifth of {task['train']} texts is held out from each "
        "training, and predicted."
    )
    settings = table(over_seeds(rows, ["settings"], FIGURES))
    choices = [_chosen(rows, rival) for rival in _rivals(rows)]
    return [words, settings, *choices]


def _rivals(rows: list[Row]) -> list[str]:
    """List the rivals that have rows, in their order."""
    names = dict.fromkeys(row["rival"] for row in rows)
    return [name for name in names if name != TRAINED]


def _chosen(rows: list[Row], rival: str) -> str:
    """Say which settings of a rival are chosen, or that all of them fail."""
    by_settings = as_frame(rows).groupby(["rival", "settings"], sort=False)
    means = by_settings[list(FIGURES)].mean()
    accuracy = means.loc[(TRAINED, TRAINED), "accuracy"]
    of_rival = means.loc[rival]
    is_accurate = of_rival["accuracy"] > accuracy - MOST_LOST
    accurate = of_rival[is_accurate]
    if accurate.empty:
        return f"{rival} fails: its settings lose {100 * MOST_LOST:g} points or more."
    best = accurate["nll"].idxmin()
    return f"{rival}: {best} is chosen, by NLL."
