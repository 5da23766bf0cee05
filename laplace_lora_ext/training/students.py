"""Students: adapters that learn a posterior's probabilities, and need none."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
import tqdm
from peft import PeftModel
from scipy.optimize import OptimizeResult, minimize_scalar
from torch import Tensor, nn
from torch.nn.functional import kl_div

from laplace_lora_ext.models.adapters import add_copy, own_adapter_back, write_adapter
from laplace_lora_ext.models.batches import pad_token
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import checkpointing, keep_derivatives
from laplace_lora_ext.models.swapping import swapping
from laplace_lora_ext.predictive.posterior import Posterior
from laplace_lora_ext.tasks.task import Task
from laplace_lora_ext.training.trainers import (
    Examples,
    peft_model_of,
    train_with,
    without_trace,
)

STEPS = 0.3
"""Steps of a student, relative to the training of its teacher."""

_TEACHER = "teacher_probabilities"

Record = dict[str, Tensor]


def distill(
    members: Sequence[Posterior],
    probabilities: Callable[[Any], Tensor],
    trainer: Any,
    unlabelled: Any = "swapped",
    adapter_name: str = "calibrated",
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> str:
    """Train an ordinary adapter whose own probabilities are those of a teacher.

    The teacher is a posterior, or several whose mean is learnt: `probabilities` takes a
    batch and returns its probabilities, `(B, C)`, or of K labels `(B, K, 2)`. The
    student begins as a copy of the first one's adapter. Other parameters, result and
    errors are those of `Predictor.distill`.
    """
    examples = Examples.of_trainer(trainer)
    first = members[0]
    model, task = first.model, first.task
    peft_model = peft_model_of(trainer, model)
    folder = Path(trainer.args.output_dir)
    with without_trace(trainer), own_adapter_back(peft_model):
        add_copy(peft_model, first.blocks[0].adapter, adapter_name)
        # A head of its own can be scaled once for all; what has none learns its scale
        # by training.
        head = _head(peft_model, adapter_name, first.n_outputs)
        records: list[Record] = []
        logits: list[Tensor] = []
        batches = _texts(model, examples, unlabelled, generator)
        title = "[Teacher's probabilities]"
        models = [member.model for member in members]
        for batch in tqdm.tqdm(batches, title, disable=not progress_bar):
            records += _taught(models, probabilities(batch), batch)
            if head:
                with model.forward_passes():
                    logits.append(task.class_logits(model(batch)).cpu())
        if head:
            targets = torch.stack([record[_TEACHER] for record in records])
            scale = best_scale(torch.cat(logits), targets)
            # Weight and bias both scale the logits.
            for weight in head:
                weight.requires_grad_(False).mul_(scale)
        _teach(trainer, model, task)
        train_with(trainer, records, STEPS, folder / adapter_name)
        if trainer.args.should_save:
            written = write_adapter(peft_model, adapter_name, {}, folder)
            if trainer.processing_class is not None:
                trainer.processing_class.save_pretrained(written)
    return adapter_name


def _head(model: PeftModel, adapter: str, n_outputs: int) -> list[nn.Parameter]:
    """List an adapter's own weights of the layer that makes the logits."""
    # Weight and bias of the last layer have a row for each output.
    return [
        weight
        for name, weight in model.named_parameters()
        if f".modules_to_save.{adapter}." in name and weight.shape[:1] == (n_outputs,)
    ]


def best_scale(logits: Tensor, probabilities: Tensor) -> float:
    """Find the factor at which logits are nearest to given probabilities.

    With labels, as probabilities of 0 and 1, it is the inverse of the best temperature.
    """

    def divergence(log_scale: float) -> float:
        scaled = logits * math.exp(log_scale)
        log_p = scaled.log_softmax(-1)
        return kl_div(log_p, probabilities, reduction="batchmean").item()

    # A posterior may be far less sure than its model, and surer by its `logit_scale`
    # alone.
    bounds = (-math.log(1e3), math.log(100))
    result = cast(OptimizeResult, minimize_scalar(divergence, bounds=bounds))
    return math.exp(result["x"])


def _texts(
    model: LogitsModel,
    examples: Examples,
    unlabelled: Any,
    generator: torch.Generator | None,
) -> list[Any]:
    """List batches without labels: training texts, and more."""

    def inputs(data: Any) -> list[Any]:
        return [model.inputs(batch) for batch in examples.batches(data)]

    training = inputs(examples.all)
    if unlabelled is None:
        return training
    if not isinstance(unlabelled, str):
        return training + inputs(unlabelled)
    generator = generator or torch.Generator().manual_seed(0)
    copies = map(swapping(model, unlabelled, training, generator), training)
    return training + [copy for copy in copies if copy is not None]


def _taught(
    models: Sequence[LogitsModel], probabilities: Tensor, batch: Any
) -> Iterator[Record]:
    """Yield a batch's texts, each with the probabilities to learn from it."""
    model = models[0]
    if model.class_token_ids is not None:
        # A student that shares its probability among the answers alone would no more
        # begin with an answer than with any other token. So the trained models decide
        # what all other tokens have together, the last of C + 1.
        of_models: list[Tensor] = []
        for each in models:
            with each.forward_passes():
                of_models.append(each.log_probs(batch)[:, -1:])
        others = torch.stack(of_models).exp().mean(0)
        probabilities = torch.cat([(1 - others) * probabilities, others], dim=1)
    labels = {model.dict_key_y, "label", "labels"}
    columns = {
        key: column
        for key, column in batch.items()
        if isinstance(column, Tensor) and key not in labels
    }
    for row, targets in enumerate(probabilities.cpu()):
        yield {_TEACHER: targets, **_text(columns, row)}


def _text(columns: Mapping[str, Tensor], row: int) -> Record:
    """Take one text out of a batch, without its padding and in main memory."""
    mask = columns["attention_mask"][row] if "attention_mask" in columns else None
    record = {}
    for key, column in columns.items():
        values = column[row]
        # What has another shape has no padding that the mask tells of.
        if mask is not None and values.shape[: mask.ndim] == mask.shape:
            # Of choices `(K, T)` goes what is padding in all of them.
            is_real = mask.bool().reshape(-1, mask.shape[-1]).any(0)
            places = is_real.nonzero().flatten()
            values = values.index_select(mask.ndim - 1, places)
        record[key] = values.cpu()
    return record


def _teach(trainer: Any, model: LogitsModel, task: Task) -> None:
    """Give a trainer a student's loss, and batches of taught texts.

    It evaluates nothing, since the user's own data suit neither.
    """
    args = copy(trainer.args)
    # The trainer knows nothing of the column that a student learns.
    args.remove_unused_columns = False
    args.eval_on_start = False
    args.eval_delay = sys.maxsize  # some callbacks refuse the strategy "no"
    # The trainer may have wrapped the model, and a `LogitsModel` is costly to make.
    student_of = cache(model.for_module)

    def compute_loss(run: Any, inputs: Any, **kwargs: Any) -> Tensor:
        targets = inputs.pop(_TEACHER)
        student = student_of(run)
        # Without dropout of any kind: each step of a trainer begins with `train()`.
        student.model.eval()
        keep_derivatives(student.tree)
        with checkpointing(student.tree):
            if student.class_token_ids is not None:
                log_p = student.log_probs(inputs)
            else:
                log_p = task.class_logits(student(inputs)).log_softmax(-1)
        return kl_div(log_p, targets.to(log_p), reduction="batchmean")

    trainer.args = args
    trainer.data_collator = partial(_collate, pad_token(model.transformer) or 0)
    trainer.compute_loss = compute_loss
    trainer.compute_loss_func = None
    # So the trainer divides the loss by the number of accumulated steps; which of these
    # tells it depends on the release of transformers.
    trainer.model_accepts_loss_kwargs = False
    trainer.loss_is_scaled_for_ga = False


def _collate(padding: int, records: Sequence[Record]) -> Record:
    """Join taught texts `(T,)` or `(K, T)` to a batch, padded behind."""
    batch = {}
    for key in records[0]:
        values = [record[key] for record in records]
        shape = [max(sizes) for sizes in zip(*(v.shape for v in values), strict=True)]
        fill = padding if key == "input_ids" else 0
        batch[key] = values[0].new_full((len(values), *shape), fill)
        for row, value in zip(batch[key], values, strict=True):
            row[tuple(map(slice, value.shape))] = value
    return batch
