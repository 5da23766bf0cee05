"""What each command does, by public functions alone."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.utils.data import Dataset
from torchmetrics.functional.classification import multiclass_confusion_matrix
from tqdm import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from laplace_lora_cli import (
    CalibrateArguments,
    DistillArguments,
    PredictArguments,
    ReportArguments,
    ReviewArguments,
)
from laplace_lora_ext.commands.loading import Loaded, check_new, load
from laplace_lora_ext.commands.report import (
    HEADER,
    UNITS,
    as_text,
    figures_of,
    page,
    reason,
    verdict,
)
from laplace_lora_ext.commands.texts import Row, fingerprints, write_table
from laplace_lora_ext.laplace import Laplace
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.plots import Outcomes, outcomes, predict_both
from laplace_lora_ext.predictive.predictions import Prediction, Review, check_review
from laplace_lora_ext.saving import FILE, write_whole

_KNOWS = "laplace_student.json"
_OF_TEXTS = ("held_out", "trained_on")  # metadata with a number for each text
_ORDER = "Are --class_names in the order of the model's outputs?"
_FEW = 10  # texts that may be right in another order by accident


def calibrate(arguments: CalibrateArguments) -> None:
    """Fit, choose the prior, save, and print the model beside its posterior."""
    folder = Path(arguments.output or arguments.adapter)
    # A folder of the name of the hub's would hide the adapter's tokenizer there.
    if arguments.output is None and not folder.is_dir():
        raise ValueError(
            f"{folder} is no folder. If it is an adapter of the hub, name a folder for "
            "its posterior by --output, and later by --posterior."
        )
    check_new(str(folder / FILE), arguments.overwrite)
    loaded = load(arguments)
    texts, labels = loaded.labelled_texts(arguments.train)
    trained_on = fingerprints(texts).unique()
    train, held_out = loaded.batches(texts, labels), None
    if arguments.validation is not None:
        unseen = loaded.unseen_texts(arguments.validation, trained_on)
        held_out = loaded.batches(*unseen)
    la = Laplace(
        loaded.model,
        "classification",
        class_texts=arguments.answers,
        tokenizer=loaded.tokenizer,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The trained model is no better than guessing")
        try:
            la.fit(train, progress_bar=True)
        except UserWarning as error:
            raise ValueError(f"{error} {_ORDER}") from error
    la.metadata = loaded.metadata() | {"trained_on": trained_on}
    if held_out is None:
        la.optimize_prior_precision(
            method="agreement", train_loader=train, progress_bar=True
        )
        results = outcomes(la, train, progress_bar=True)
        known_as = "training texts, which the model knows"
    else:
        la.optimize_prior_precision(
            method="gridsearch", val_loader=held_out, progress_bar=True
        )
        results = outcomes(la, held_out, progress_bar=True)
        results = results._replace(temperature=results.best_temperature())
        known_as = "validation texts, which have chosen prior and temperature"
        la.metadata["held_out"] = {
            "probabilities": results.prediction.probabilities,
            "labels": results.labels,
        }
    _check_order(results, loaded.class_names)
    figures = [list(HEADER), *figures_of(results)]
    said = verdict(results, la.logit_scale)
    measured_on = f"{len(results.labels)} {known_as}"
    la.metadata |= {
        "temperature": results.temperature,
        "measured_on": measured_on,
        "figures": figures,
        "verdict": said,
    }
    if arguments.amortize:
        la.amortize(train, progress_bar=True)
    la.save_pretrained(folder)
    print(f"On {measured_on}:\n{as_text(figures)}")
    print(f"{UNITS}\n{said}\nThe posterior is in {folder / FILE}.")


def _check_order(results: Outcomes, names: list[str]) -> None:
    """Refuse names in an order in which the trained model is right far less often."""
    # How many texts of each label have each answer.
    counts = multiclass_confusion_matrix(results.trained, results.labels, len(names))
    labels, outputs = linear_sum_assignment(counts, maximize=True)
    is_moved = outputs != labels
    n_right = counts.diag()[is_moved].sum().item()
    n_other = counts[labels, outputs][is_moved].sum().item()
    # A few texts may be right in another order by accident, and classes that a model
    # confuses nearly as often as in their own.
    if n_other < 2 * n_right + _FEW:
        return
    by_output = [names[label] for label in outputs.argsort().tolist()]
    raise ValueError(
        "The trained model would be right far more often if its outputs were "
        f"{', '.join(by_output)}. {_ORDER}"
    )


def predict(arguments: PredictArguments) -> None:
    """Append a line of JSON for each text, batch by batch."""
    output = Path(arguments.output)
    if not arguments.resume:
        check_new(arguments.output, False, "pass --resume to go on with it, or another")
    loaded = load(arguments)
    la = loaded.posterior()
    if arguments.amortized and la.learnt_variance is None:
        raise ValueError("--amortized needs variances: calibrate with --amortize.")
    rows, texts = loaded.texts(arguments.data)
    n_done = _keep_whole_lines(output, texts) if output.exists() else 0
    pred_type = "amortized" if arguments.amortized else "glm"
    output.parent.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=len(texts), initial=n_done, desc="[Predictions]", unit="text")
    with output.open("a", encoding="utf-8") as file, bar:
        for batch in loaded.batches(texts[n_done:]):
            logits, prediction = predict_both(la, batch, pred_type)
            trained = la.task.class_logits(logits).softmax(-1)
            for line in _lines(loaded, prediction, trained, la.has_variance):
                row, text = rows[n_done], texts[n_done]
                n_done += 1
                shown = {"id": row.get("id", n_done), "text": text, **line}
                if arguments.all_columns:
                    shown["columns"] = row
                file.write(json.dumps(shown, ensure_ascii=False) + "\n")
                bar.update()
            file.flush()


def _lines(
    loaded: Loaded, prediction: Prediction, trained: torch.Tensor, has_variance: bool
) -> list[Row]:
    """Say what is predicted of each text of a batch."""
    lines = []
    for number, probabilities in enumerate(prediction.probabilities.tolist()):
        label = int(prediction.labels[number])
        doubt = prediction.epistemic_entropy[number].item()
        lines.append(
            {
                "label": loaded.class_names[label],
                "probability": probabilities[label],
                "probabilities": dict(
                    zip(loaded.class_names, probabilities, strict=True)
                ),
                # Without variance nothing is known of it, which is not 0.
                "epistemic_entropy": doubt if has_variance else None,
                "trained_model": trained[number, label].item(),
            }
        )
    return lines


def _keep_whole_lines(output: Path, texts: list[str]) -> int:
    """Cut off an unfinished last line, and count the others; refuse other texts'."""
    written = output.read_bytes()
    end = written.rfind(b"\n") + 1
    done = [json.loads(line).get("text") for line in written[:end].splitlines()]
    if done != texts[: len(done)]:
        raise ValueError(
            f"{output} has predictions of other texts than --data: pass another "
            "--output."
        )
    os.truncate(output, end)
    return len(done)


def report(arguments: ReportArguments) -> None:
    """Write a page of HTML."""
    output = check_new(arguments.output, arguments.overwrite)
    loaded = load(arguments)
    la = loaded.posterior()
    texts, labels = loaded.unseen_texts(arguments.data, _trained_on(la))
    results = outcomes(la, loaded.batches(texts, labels), progress_bar=True)
    results = results._replace(temperature=la.metadata.get("temperature"))
    said = verdict(results, la.logit_scale)
    document = page(arguments.title, said, results, texts, loaded.class_names)
    write_whole(output, document.encode())
    print(f"{said}\nThe report is in {output}.")


def review(arguments: ReviewArguments) -> None:
    """Write a queue, and print what is decided alone and what is proven of it."""
    output = check_new(arguments.output, arguments.overwrite)
    if (arguments.accuracy is None) == (arguments.capacity is None):
        raise ValueError("Pass --accuracy or --capacity, and not both.")
    loaded = load(arguments)
    la = loaded.posterior()
    check_review(arguments.accuracy, arguments.costs, len(loaded.class_names))
    rows, texts = loaded.texts(arguments.data)
    tested = None
    if arguments.test is not None:
        unseen = loaded.unseen_texts(arguments.test, _trained_on(la))
        tested = loaded.batches(*unseen)
    generator = torch.Generator(la.model.device).manual_seed(0)
    prediction = la.predict(
        loaded.batches(texts), generator=generator, progress_bar=True
    )
    assert isinstance(prediction, Prediction)
    queue = prediction.review(arguments.accuracy, arguments.capacity, arguments.costs)
    write_table(_queue_lines(loaded, rows, texts, prediction, queue), output)
    promised = f"an accuracy of {queue.promise:.3f}"
    if queue.costs is not None:
        promised = f"a mean cost of {1 - queue.promise:.3f}"
    print(
        f"{queue.share:.0%} of {len(texts)} texts are decided alone, and "
        f"{queue.n_to_read} are for a person."
    )
    if queue.share:
        print(f"Of what is decided alone the posterior promises {promised}.")
    held_out = la.metadata.get("held_out")
    if queue.costs is not None:
        print("Nothing is proven of a mean cost: right answers prove an accuracy.")
    elif tested is not None:
        results = outcomes(la, tested, progress_bar=True)
        print(queue.proof(results.prediction.probabilities, results.labels))
    elif held_out is not None:
        proof = queue.proof(held_out["probabilities"], held_out["labels"])
        print(proof)
        if proof.n_decided:
            print("They have chosen the prior too, so they are a little too kind.")
    else:
        print(
            "Nothing is proven: no texts were held out. Pass labelled ones as --test."
        )
    print(f"The queue is in {output}.")


def _trained_on(la: LoRALaplace) -> torch.Tensor:
    """Return the fingerprints of training texts; none of a fit in Python."""
    return la.metadata.get("trained_on", torch.tensor([]))


def _queue_lines(
    loaded: Loaded,
    rows: list[Row],
    texts: list[str],
    prediction: Prediction,
    queue: Review,
) -> list[Row]:
    """Say of each text who decides it and why, the most doubtful first."""
    lines = []
    for number, place in enumerate(queue.order.tolist()):
        label = int(queue.labels[place])
        lines.append(
            {
                "decided_by": "person" if number < queue.n_to_read else "model",
                "id": rows[place].get("id", place + 1),
                "text": texts[place],
                "label": loaded.class_names[label],
                "probability": f"{prediction.probabilities[place, label].item():.4f}",
                "reason": reason(prediction, place, loaded.class_names),
            }
        )
    return lines


def distill(arguments: DistillArguments) -> None:
    """Train a student by a trainer of the given settings."""
    output = check_new(arguments.output, False, "pass another")
    loaded = load(arguments)
    la = loaded.posterior()
    # Which makes it trainable.
    loaded.model.set_adapter(str(loaded.model.active_adapter))
    _, texts = loaded.texts(arguments.train)
    rows = [loaded.encoded(text) for text in texts]
    trainer = trainer_with_bar(
        loaded.model,
        loaded.tokenizer,
        rows,
        output,
        num_train_epochs=arguments.epochs,
        learning_rate=arguments.learning_rate,
        per_device_train_batch_size=arguments.batch_size,
        seed=arguments.seed,
    )
    name = la.distill(trainer, progress_bar=True)
    _write_student(loaded, output / name, la.metadata)
    print(f"The student is in {output / name}.")
    if arguments.merge:
        loaded.model.set_adapter(name)
        merged: Any = loaded.model.merge_and_unload()
        merged.save_pretrained(output / "merged")
        loaded.tokenizer.save_pretrained(output / "merged")
        print(f"The model without an adapter is in {output / 'merged'}.")


def trainer_with_bar(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Any],
    output: Path,
    **options: Any,
) -> Trainer:
    """Make a trainer that shows a bar; options are those of `TrainingArguments`."""
    settings = TrainingArguments(
        output_dir=str(output),
        save_strategy="no",
        report_to=[],
        disable_tqdm=False,
        dataloader_pin_memory=False,  # asked for without an accelerator, a warning
        **options,
    )
    data = cast(Dataset[Any], rows)  # any sequence will do
    return Trainer(model, settings, train_dataset=data, processing_class=tokenizer)


def _write_student(loaded: Loaded, folder: Path, metadata: Mapping[str, Any]) -> None:
    """Complete a student's folder by what its teacher's file knows.

    Whoever opens an adapter reads the classes' names off the base model, and a pipeline
    reads its head there: beside a classifier's adapter is a copy that knows both.
    """
    known = {key: value for key, value in metadata.items() if key not in _OF_TEXTS}
    content = json.dumps(known, indent=2, ensure_ascii=False)
    write_whole(folder / _KNOWS, content.encode())
    if loaded.arguments.answers:
        return
    adapter = PeftConfig.from_pretrained(str(folder))
    base = AutoModelForSequenceClassification.from_pretrained(
        str(adapter.base_model_name_or_path),
        config=loaded.model.config,
        revision=adapter.revision,
        dtype="auto",
    )
    base.save_pretrained(folder / "base")
    loaded.tokenizer.save_pretrained(folder / "base")
    adapter.base_model_name_or_path = str((folder / "base").resolve())
    adapter.save_pretrained(str(folder))
