"""The main job: fine-tune one model, run every method on it, and report."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import report
from benchmarks.fine_tuning import PREDICTION_BATCH_SIZE, TEST, Pretrained, fine_tune, prepare
from benchmarks.measuring import peak_memory, run_alone, set_up
from benchmarks.methods import METHODS, posterior
from benchmarks.methods.method import PointMethod, labels_of
from benchmarks.methods.priors import BY_TRAINING, NO_PRIOR, Prior, probabilities
from benchmarks.metrics import shift_detection
from benchmarks.models import AdaptedModel
from benchmarks.options import Compare
from laplace_lora_ext.metrics import quality, reliability

COLUMNS = (
    "label accuracy nll ece brier test_entropy shifted_entropy shift_auroc fit_seconds "
    "predict_seconds prediction_batch_size peak_megabytes"
)


@dataclass(frozen=True)
class Line:
    """A row of the table: keys of method, prior and link, and batch sizes."""

    method: str
    prior: str = ""
    link: str = ""
    fit_batch_size: int | None = None
    prediction_batch_size: int = PREDICTION_BATCH_SIZE

    @property
    def way(self) -> Prior:
        """How the prior precision is chosen."""
        return BY_TRAINING.get(self.prior, NO_PRIOR)


EVIDENCE = ("marglik_layerwise", "probit")
PROTOCOL = ("marglik_scalar", "mc")  # of the paper's first tables
RECIPE = Line("lowrank_kron", "agreement", "mean_field")  # the README's example


def lines_of(options: Compare) -> list[Line]:
    """The rows of the table, from the bare model to the library's recipe."""
    # Stock classes take a pass over the whole batch for each of its logits, so that texts are
    # cheapest one at a time. Only KFAC is fitted on whole batches: they change its estimate.
    lines = [
        Line("map"),
        Line("temperature_scaling"),
        Line("stock_diag", *EVIDENCE, fit_batch_size=1, prediction_batch_size=1),
        Line("stock_kron", *EVIDENCE, prediction_batch_size=1),
        Line("lowrank_kron_paper", *EVIDENCE),
    ]
    every = [Line("lowrank_kron", *EVIDENCE)]
    every += [Line(key, *PROTOCOL) for key in ("lowrank_kron_paper", "lowrank_kron")]
    return [*lines, *(every if options.every_row else []), RECIPE]


def run(options: Compare) -> Iterator[report.Result]:
    """Measure each row in a process of its own; then draw a diagram."""
    started = time.perf_counter()
    pretrained = prepare(options, options.seed, options.validation_examples)
    pretrained = pretrained.for_epochs(options.epochs)
    read = time.perf_counter()
    model = fine_tune(pretrained, pretrained.data["train"], options.seed)
    train = pretrained.loader("train", PREDICTION_BATCH_SIZE)
    known = quality(model.logits(train).softmax(-1), labels_of(train))
    trained = time.perf_counter()
    lines, rows = lines_of(options), []
    alone = options if options.threads else replace(options, threads=1)  # of two cores
    with ThreadPoolExecutor(1 if pretrained.device.startswith("cuda") else 2) as pool:
        found = pool.map(lambda line: run_alone(measure, line, pretrained, alone), lines)
        progress = tqdm(found, total=len(lines), disable=options.quiet)
        for line, figures in zip(lines, progress, strict=True):
            row = {"name": METHODS[line.method].title, "chosen_by": line.way.title, **asdict(line)}
            rows.append({**row, "label": report.label(row), **figures})
    seconds = {"reading": read - started, "fine_tuning": trained - read}
    data = pretrained.description
    figures = {
        "data": data,
        "training": {"train_accuracy": known["accuracy"], "train_nll": known["nll"]},
        "methods": rows,
        "seconds": {**seconds, "methods": time.perf_counter() - trained},
    }
    summary = (
        f"{pretrained.hyperparameters.model} with LoRA, fine-tuned on {data['train']} texts of "
        f"the task {data['name']} (training accuracy {known['accuracy']:.3f}, NLL "
        f"{known['nll']:.4f}); measured on {data['test']} texts of {', '.join(data['classes'])};\n"
        f"shifted texts: {report.counts(data['shifted'])}; seed {options.seed}."
    )
    yield figures, [summary, report.table(rows, COLUMNS.split())]
    report.draw_reliability([rows[0], rows[-1]], options.output / "reliability.png")


def measure(line: Line, pretrained: Pretrained, options: Compare) -> report.Row:
    """Fit a method to the fine-tuned model, predict, and return the row's figures."""
    set_up(options)
    model = fine_tune(pretrained, pretrained.data["train"], options.seed)
    test = pretrained.loader(TEST, line.prediction_batch_size)
    shifted = [pretrained.loader(x, line.prediction_batch_size) for x in pretrained.task.shifted]
    # Weights are mapped from their file: they count as memory once they are used.
    model.logits([next(iter(test))])
    with peak_memory(pretrained.device) as memory:
        started = time.perf_counter()
        predict, chosen = fitted(line, model, pretrained, options.samples)
        fitted_at = time.perf_counter()
        found = predict(test)
        predicted_at = time.perf_counter()
        found_shifted = [predict(loader) for loader in shifted]
    return {
        **quality(found, labels_of(test)),
        **(shift_detection(found, torch.cat(found_shifted)) if shifted else {}),
        "fit_seconds": fitted_at - started,
        "predict_seconds": predicted_at - fitted_at,
        "peak_megabytes": memory["megabytes"],
        "chosen": chosen,
        "reliability": reliability(found, labels_of(test)),
    }


def fitted(
    line: Line, model: AdaptedModel, pretrained: Pretrained, samples: int
) -> tuple[Callable[[Any], torch.Tensor], dict[str, Any]]:
    """Fit a method; return a function that predicts batches, and the value that was chosen."""
    method = METHODS[line.method]
    if isinstance(method, PointMethod):
        validation = pretrained.loader("validation", PREDICTION_BATCH_SIZE)
        members = method.fit(model, pretrained.loader("train", PREDICTION_BATCH_SIZE), validation)
        chosen = {"temperature": members.temperature} if method.needs_validation else {}
        return lambda batches: members.predict({"": batches})[""], chosen
    train = pretrained.loader("train", line.fit_batch_size)
    la = posterior(line.method).build(model)
    la.fit(train)
    assert line.way.choose is not None
    prior_precision = line.way.choose(la, train if line.way.reads else None)

    def predict(batches: Any) -> torch.Tensor:
        return torch.cat([probabilities(la, batch, line.link, samples) for batch in batches])

    return predict, {"prior_precision": prior_precision.tolist()}
