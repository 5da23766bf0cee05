"""What each command does, by public functions alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import Dataset
from transformers import TrainingArguments

from laplace_lora_cli.arguments import (
    CalibrateArguments,
    DistillArguments,
    PredictArguments,
    ReportArguments,
)
from laplace_lora_ext import plots
from laplace_lora_ext.commands.loading import check_new, load
from laplace_lora_ext.commands.page import page
from laplace_lora_ext.commands.texts import UsageError
from laplace_lora_ext.commands.training import trainer_with_bar
from laplace_lora_ext.files import write_whole
from laplace_lora_ext.metrics import compare
from laplace_lora_ext.predictive.decisions import Prediction

_POSTERIOR = "laplace_posterior.safetensors"


def calibrate(arguments: CalibrateArguments) -> None:
    """Fit, choose the prior, save, and print the model beside its posterior."""
    folder = Path(arguments.output or arguments.adapter)
    check_new(
        str(folder / _POSTERIOR), arguments.overwrite, "pass --overwrite to replace it"
    )
    loaded = load(arguments)
    train = loaded.labelled_batches(arguments.train)
    la = loaded.new_posterior()
    la.fit(train, progress_bar=True)
    if arguments.validation is None:
        la.optimize_prior_precision(
            method="agreement", train_loader=train, progress_bar=True
        )
        measured, known_as = train, "the training texts, which the model knows"
    else:
        measured = loaded.labelled_batches(arguments.validation)
        known_as = "the validation texts, which have chosen the prior"
        la.optimize_prior_precision(
            method="gridsearch",
            val_loader=measured,
            link_approx="mean_field",
            progress_bar=True,
        )
    la.metadata = loaded.metadata()
    la.save_pretrained(folder)
    print(f"On {known_as}:")
    print(compare(la, measured))
    print(f"The posterior is in {folder / _POSTERIOR}.")


def predict(arguments: PredictArguments) -> None:
    """Append a line of JSON for each text, batch by batch."""
    output = check_new(
        arguments.output,
        arguments.resume,
        "pass --resume to go on with it, or another --output",
    )
    loaded = load(arguments)
    la = loaded.posterior()
    if arguments.amortized and la.learnt_variance is None:
        if arguments.train is None:
            raise UsageError(
                "--amortized needs --train, the texts to learn variances from."
            )
        la.amortize(loaded.batches(loaded.texts(arguments.train)), progress_bar=True)
    texts = loaded.texts(arguments.data)
    n_done = _keep_whole_lines(output) if output.exists() else 0
    if n_done > len(texts):
        raise UsageError(
            f"{output} has more lines than {arguments.data}: pass another --output."
        )
    pred_type = "amortized" if arguments.amortized else "glm"
    generator = torch.Generator(la.model.device)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as file:
        for batch in loaded.batches(texts[n_done:]):
            # Every batch sees the same draws, so that a run that was resumed gives the
            # same lines.
            generator.manual_seed(0)
            prediction = la.predict(batch, generator=generator, pred_type=pred_type)
            assert isinstance(
                prediction, Prediction
            )  # of classes, as the command line has no others
            for number, probabilities in enumerate(prediction.probabilities.tolist()):
                line = {
                    "label": loaded.classes.names[int(prediction.labels[number])],
                    "probabilities": probabilities,
                    "epistemic_entropy": prediction.epistemic_entropy[number].item(),
                    "aleatoric_entropy": prediction.aleatoric_entropy[number].item(),
                }
                file.write(json.dumps(line) + "\n")
            file.flush()


def _keep_whole_lines(output: Path) -> int:
    """Cut off an unfinished last line, and count the others."""
    written = output.read_bytes()
    end = written.rfind(b"\n") + 1
    os.truncate(output, end)
    return written.count(b"\n", 0, end)


def report(arguments: ReportArguments) -> None:
    """Write a page of HTML."""
    output = check_new(
        arguments.output, arguments.overwrite, "pass --overwrite to replace it"
    )
    loaded = load(arguments)
    la = loaded.posterior()
    texts, labels = loaded.labelled_texts(arguments.data)
    results = plots.outcomes(la, loaded.batches(texts, labels), progress_bar=True)
    document = page(arguments.title, results, texts, loaded.classes.names)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, document.encode())
    print(f"The report is in {output}.")


def distill(arguments: DistillArguments) -> None:
    """Train a student by a trainer of the given settings."""
    output = check_new(arguments.output, False, "pass another --output")
    if arguments.epochs <= 0:
        raise UsageError(
            f"--epochs {arguments.epochs:g} is no training: pass more than 0."
        )
    loaded = load(arguments)
    la = loaded.posterior()
    for name, weight in loaded.model.named_parameters():
        weight.requires_grad_(".lora_" in name or ".modules_to_save." in name)
    texts, labels = loaded.labelled_texts(arguments.train)
    encoded = loaded.batches.encoded(texts)
    rows = []
    for place, label in enumerate(labels):
        inputs = {key: encoded[key][place] for key in encoded}
        rows.append(inputs | {"labels": label})
    settings = TrainingArguments(
        output_dir=str(output),
        num_train_epochs=arguments.epochs,
        learning_rate=arguments.learning_rate,
        per_device_train_batch_size=arguments.batch_size,
        seed=arguments.seed,
        save_strategy="no",
        report_to=[],
    )
    trainer = trainer_with_bar(
        loaded.model,
        settings,
        cast(Dataset[Any], rows),  # any sequence will do
        processing_class=loaded.batches.tokenizer,
    )
    name = la.distill(trainer, progress_bar=True)
    print(f"The student is in {output / name}.")
