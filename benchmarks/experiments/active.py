"""Active learning: which texts to label next, by a posterior and by plain rivals."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from benchmarks.fine_tuning import TEST, TRAIN, Pretrained, fine_tune, prepare
from benchmarks.frozen import frozen_features, k_centres
from benchmarks.methods.method import labels_of
from benchmarks.methods.posteriors import lowrank_kron
from benchmarks.models import AdaptedModel
from benchmarks.options import Active
from benchmarks.report import (
    Result,
    Row,
    over_seeds,
    paired_differences,
    say,
    seeds_of,
    table,
)
from benchmarks.rounds import Rounds
from benchmarks.tasks.task import Example, Task
from benchmarks.training import UpperLayers
from laplace_lora_ext.acquisitions import entropy, margin
from laplace_lora_ext.metrics import quality

TEXTS_TO_BEGIN = 2  # of each intent
PLAIN = "random"
FIGURES = ("accuracy", "nll")


@dataclass
class Labelling(Rounds):
    """Texts that are labelled by rounds, and the model that is trained on them."""

    model: AdaptedModel

    def probabilities(self) -> Tensor:
        """Predict the pool with the trained model."""
        batches = self.pretrained.prediction_loader(self.pool)
        return self.model.logits(batches).softmax(-1)


def by_entropy(this: Labelling) -> list[int]:
    """Choose those of which the trained model is least sure."""
    doubts = entropy(this.probabilities())
    return doubts.topk(this.n).indices.tolist()


def by_margin(this: Labelling) -> list[int]:
    """Choose those whose two first classes are nearest to each other."""
    doubts = margin(this.probabilities())
    return doubts.topk(this.n).indices.tolist()


def by_core_set(this: Labelling) -> list[int]:
    """Choose those that are unlike all that is labelled."""
    candidates = frozen_features(this.pretrained, this.pool)
    known = frozen_features(this.pretrained, this.known)
    return k_centres(candidates, known, this.n)


def by_bald(this: Labelling) -> list[int]:
    """Choose those whose labels tell most of the weights, each by itself."""
    return _by_posterior(this, "bald")


def by_joint_information(this: Labelling) -> list[int]:
    """Choose those whose labels together tell most of the weights."""
    return _by_posterior(this, "batch_bald")


def _by_posterior(this: Labelling, by: str) -> list[int]:
    """Fit a posterior over the LoRA weights, whose training texts choose its prior."""
    la = lowrank_kron(this.model)
    loader = this.pretrained.loader(this.known)
    la.fit(loader, progress_bar=False)
    # By training texts: none of the few that have a label can be spared to choose.
    la.optimize_prior_precision(method="agreement", train_loader=loader)
    batches = this.pretrained.prediction_loader(this.pool)
    places = la.acquire(batches, this.n, by=by, seed=this.seed)
    return places.tolist()


RULES: dict[str, Callable[[Labelling], list[int]]] = {
    PLAIN: Labelling.at_random,
    "entropy of the model": by_entropy,
    "margin of the model": by_margin,
    "core-set": by_core_set,
    "bald": by_bald,
    "batch_bald": by_joint_information,
}


def run(options: Active) -> Iterator[Result]:
    """Measure each seed with each rule."""
    rows: list[Row] = []
    for seed in options.seeds:
        pretrained = prepared(options, seed)
        for name in RULES:
            say(options, f"Seed {seed}: {name}")
            rows += measured(pretrained, options, seed, name)
        figures = {**pretrained.figures, "rows": rows}
        yield figures, text_of(pretrained, options, rows)


def prepared(options: Active, seed: int) -> Pretrained:
    """Read a task, of which the first intents of the alphabet are kept."""
    pretrained = prepare(options, seed)
    task = limited(pretrained.task, options.intents)
    n_first = TEXTS_TO_BEGIN * len(task.classes)
    n_least = n_first + options.rounds * options.batch
    if len(task.train) < n_least:
        raise SystemExit(
            f"There are {len(task.train)} texts to choose from, and {n_least} to be "
            "labelled: give more --train-examples, or fewer --rounds."
        )
    return replace(pretrained, task=task)


def limited(task: Task, n_classes: int) -> Task:
    """Keep the first classes of a task, and the examples that have one of them."""
    return replace(
        task,
        classes=task.classes[:n_classes],
        train=_with_label_below(n_classes, task.train),
        test=_with_label_below(n_classes, task.test),
        shifted={},
    )


def _with_label_below(end: int, examples: Sequence[Example]) -> list[Example]:
    kept = []
    for example in examples:
        if example.label is not None and example.label < end:
            kept.append(example)
    return kept


def measured(
    pretrained: Pretrained,
    options: Active,
    seed: int,
    name: str,
) -> Iterator[Row]:
    """Train, measure and choose by turns, from two texts of each intent."""
    records = pretrained.data[TRAIN]  # the classes by turns
    n_first = TEXTS_TO_BEGIN * len(pretrained.task.classes)
    labelled = records[:n_first]
    test = pretrained.prediction_loader(pretrained.data[TEST])
    labels = labels_of(pretrained.data[TEST])
    recipe = UpperLayers(pretrained.load().config.num_hidden_layers)
    model = fine_tune(pretrained, labelled, seed, recipe)
    this = Labelling(
        pretrained,
        seed,
        n=options.batch,
        known=labelled,
        pool=records[n_first:],
        model=model,
    )
    choose = RULES[name]
    for number in range(options.rounds + 1):
        figures = quality(model.logits(test).softmax(-1), labels)
        yield {
            "name": name,
            "seed": seed,
            "labels": len(this.known),
            "accuracy": figures["accuracy"],
            "nll": figures["nll"],
        }
        # The last training is measured only.
        if number == options.rounds:
            break
        places = choose(this)
        # In the order of a set, in which all figures have been measured.
        this.learn(set(places))
        this.train(model, recipe, options.share)


def text_of(
    pretrained: Pretrained,
    options: Active,
    rows: list[Row],
) -> list[str]:
    """Put the figures in words and tables."""
    task = pretrained.task
    n_first = TEXTS_TO_BEGIN * len(task.classes)
    n_texts = len(task.train) - n_first
    words = (
        f"{task.name}: {len(task.classes)} intents, {TEXTS_TO_BEGIN} labelled texts of "
        f"each to begin with, {n_texts} texts to choose from, {options.batch} a "
        f"round, {len(task.test)} test texts, seeds: {seeds_of(rows)}. LoRA weights in "
        "the upper half of the encoder, and the head, are trained by "
        f"{pretrained.hyperparameters.steps} steps first, and in each round by a share "
        f"of {options.share} of these, from where they are. Accuracy and NLL are the "
        "trained model's, mean ± standard deviation over seeds."
    )
    chosen = [row for row in rows if row["labels"] > n_first]
    return [
        words,
        table(over_seeds(rows, ("labels", "name"), FIGURES)),
        f"Differences from {PLAIN} with the same seed, means over all rounds after a "
        "choice; mean ± standard error over seeds:",
        table(paired_differences(chosen, PLAIN, FIGURES)),
    ]
