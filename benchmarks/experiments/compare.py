"""The main job: fine-tune one model, run every method on it, and report."""

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.fine_tuning import Pretrained, fine_tune, prepare
from benchmarks.measuring import PeakMemory, Send, run_alone, seconds_of
from benchmarks.methods import METHODS
from benchmarks.methods.links import LINKS, probabilities
from benchmarks.methods.method import PointMethod, Posterior
from benchmarks.methods.priors import EVIDENCES, LINEARIZED
from benchmarks.metrics import quality, reliability, shift_detection
from benchmarks.models import AdaptedModel, by_length
from benchmarks.options import Compare
from benchmarks.report import (
    Figures,
    draw_reliability,
    hardware_of,
    label,
    provenance,
    table,
    write,
)

PREDICTION_BATCH_SIZE = 8
COLUMNS = (
    ("label", "Method", ""),
    ("accuracy", "Accuracy", ".3f"),
    ("nll", "NLL", ".3f"),
    ("ece", "ECE", ".3f"),
    ("brier", "Brier", ".3f"),
    ("test_entropy", "Entropy, test", ".3f"),
    ("shifted_entropy", "Entropy, shifted", ".3f"),
    ("shift_auroc", "AUROC of shift", ".3f"),
    ("fit_seconds", "Fit (s)", ".1f"),
    ("predict_seconds", "Predict (s)", ".1f"),
    ("prediction_batch_size", "Batch", ""),
    ("peak_megabytes", "Peak memory (MB)", ".0f"),
)
KNOWN_WARNINGS = (
    "By default `link_approx`",  # every call names its link
    "The posterior is over lora_A and lora_B",  # the head stays at its MAP value in every row
    "There is a performance drop",  # the stock classes' price, which the table shows
)


@dataclass(frozen=True)
class Line:
    """A row of the table: a method's key, what chooses its prior precision, its link, and batches.

    The batch size of a fit is that of the training, if none is given.
    """

    method: str
    chosen_by: str = ""
    link: str = ""
    fit_batch_size: int | None = None
    prediction_batch_size: int = PREDICTION_BATCH_SIZE


# The README's example.
RECIPE = Line("lowrank_kron", "leave-one-out, layerwise", "mean field")


def lines_of(options: Compare) -> list[Line]:
    """The table's rows, from the bare model to the library's."""
    settings = (f"evidence, {options.prior_structure}", options.link)
    protocol = ("evidence, scalar", "mc")
    # Stock classes differentiate every logit of a batch with respect to the weights by passes over
    # the whole batch, so that a text costs the least time and memory in a batch of its own.
    # KFAC alone is fitted on whole batches, which change what it estimates.
    lines = [
        Line("map"),
        Line("temperature_scaling"),
        Line("stock_diag", *settings, fit_batch_size=1, prediction_batch_size=1),
        Line("stock_kron", *settings, prediction_batch_size=1),
        Line("lowrank_kron_paper", *settings),
    ]
    if options.every_row:
        lines.append(Line("lowrank_kron", *settings))
    if options.every_row and settings != protocol:
        lines += [Line("lowrank_kron_paper", *protocol), Line("lowrank_kron", *protocol)]
    return [*lines, RECIPE]


def run(options: Compare) -> Figures:
    """Measure every row, each in a process of its own, and write figures, table and diagram."""
    started = time.perf_counter()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    pretrained = prepare(options, options.seed, options.validation_examples)
    pretrained = pretrained.for_epochs(options.epochs)
    task = pretrained.task
    read = time.perf_counter()
    train = pretrained.records(task.train)
    model = fine_tune(pretrained, train, options.seed)
    labels = torch.tensor([record["labels"] for record in train])
    logits = model.logits(pretrained.loader(train, PREDICTION_BATCH_SIZE))
    known = quality(logits.softmax(-1), labels)
    trained = time.perf_counter()
    lines = lines_of(options)
    rows = []
    for number, line in enumerate(lines, start=1):
        row = {"name": METHODS[line.method].title, **asdict(line)}
        if not options.quiet:
            print(f"{number}/{len(lines)} {label(row)}", file=sys.stderr)
        row |= run_alone(measure, line, pretrained, options)
        rows.append({"label": label(row)} | row)
    (shifted,) = task.shifted
    figures = {
        **provenance(options, pretrained.device),
        "data": {
            "task": task.name,
            "classes": list(task.classes),
            "shifted": shifted,
            "train": len(task.train),
            "validation": len(task.validation),
            "test": len(task.test),
            "shifted_texts": len(task.shifted[shifted]),
        },
        "training": {"train_accuracy": known["accuracy"], "train_nll": known["nll"]},
        "methods": rows,
        "seconds": {
            "reading": read - started,
            "fine_tuning": trained - read,
            "methods": time.perf_counter() - trained,
        },
    }
    draw_reliability([rows[0], rows[-1]], options.output / "reliability.png")
    report = f"{_summary(figures, pretrained)}\n\n{table(rows, COLUMNS)}"
    write(options.output, "figures", figures, report, "table")
    return figures


def measure(send: Send, line: Line, pretrained: Pretrained, options: Compare) -> None:
    """Fit a method to the fine-tuned model, predict, and send the row's figures."""
    for known in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=known)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    task = pretrained.task
    train, validation, test = (
        pretrained.records(examples) for examples in (task.train, task.validation, task.test)
    )
    ((_, examples),) = task.shifted.items()
    model = fine_tune(pretrained, train, options.seed)
    fit_batch_size = line.fit_batch_size or pretrained.hyperparameters.batch_size
    loaders = {
        "train": pretrained.loader(train, fit_batch_size),
        "validation": pretrained.loader(validation, PREDICTION_BATCH_SIZE),
    }
    test = by_length(test)
    test_loader, shifted_loader = (
        pretrained.loader(records, line.prediction_batch_size)
        for records in (test, by_length(pretrained.records(examples)))
    )
    # The weights are mapped from their file: they count as the model's memory once they are used.
    model.logits(pretrained.loader(test[:1], 1))

    found: dict[str, Any] = {}

    def fit() -> None:
        found["predict"], found["chosen"] = fitted(line, model, loaders, options.samples)

    with PeakMemory(pretrained.device) as memory:
        fit_seconds = seconds_of(fit)
        predict = found["predict"]
        predict_seconds = seconds_of(lambda: found.update(test=predict(test_loader)))
        shifted = predict(shifted_loader)
    labels = torch.tensor([record["labels"] for record in test])
    send(
        "row",
        {
            **quality(found["test"], labels),
            **shift_detection(found["test"], shifted),
            "fit_seconds": fit_seconds,
            "predict_seconds": predict_seconds,
            "peak_megabytes": memory.megabytes,
            "chosen": found["chosen"],
            "reliability": reliability(found["test"], labels),
        },
    )


def fitted(
    line: Line, model: AdaptedModel, loaders: dict[str, Any], samples: int
) -> tuple[Callable[[Any], torch.Tensor], dict[str, Any]]:
    """Fit a method; return what predicts batches, and its temperature or prior precisions."""
    method = METHODS[line.method]
    if isinstance(method, PointMethod):
        members = method.fit(model, loaders["validation"])
        chosen = {"temperature": members.temperature} if method.needs_validation else {}
        return lambda batches: members.predict({"": batches})[""], chosen
    assert isinstance(method, Posterior)
    la = method.build(model)
    la.fit(loaders["train"])
    if line.chosen_by in LINEARIZED:
        la.optimize_prior_precision(train_loader=loaders["train"], **LINEARIZED[line.chosen_by])
    else:
        la.optimize_prior_precision(**EVIDENCES[line.chosen_by])
    link = LINKS[line.link]

    def predict(batches: Any) -> torch.Tensor:
        return torch.cat([probabilities(la, batch, link, samples).detach() for batch in batches])

    return predict, {"prior_precision": la.prior_precision.tolist()}


def _summary(figures: Figures, pretrained: Pretrained) -> str:
    """Say in a few lines what the table's figures were measured on."""
    data, training = figures["data"], figures["training"]
    seconds = sum(figures["seconds"].values())
    return (
        f"{pretrained.hyperparameters.model} with LoRA, fine-tuned on {data['train']} texts of "
        f"the task {data['task']} (training accuracy {training['train_accuracy']:.3f}, NLL "
        f"{training['train_nll']:.4f});\nmeasured on {data['test']} texts of "
        f"{len(data['classes'])} classes ({', '.join(data['classes'])})\nand, as shifted text, "
        f"{data['shifted_texts']} of {data['shifted']}. {hardware_of(figures)}; seed "
        f"{figures['settings']['seed']}; {seconds:.0f} s in all."
    )
