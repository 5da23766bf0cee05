"""A student: an adapter that learns a posterior's probabilities, and needs no posterior itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
import tqdm
from peft import PeftModel
from scipy.optimize import minimize_scalar
from torch import nn
from torch.nn.functional import kl_div
from torch.nn.utils.rnn import pad_sequence

from laplace_lora_ext.models.adapters import (
    add_fresh_adapter,
    find_peft_model,
    own_adapter_back,
    own_weights,
    write_adapter,
)
from laplace_lora_ext.models.batches import named_batches, pad_token
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.swapping import Swapping
from laplace_lora_ext.training.trainers import (
    check_trainer,
    loader_of,
    restored,
    train,
    with_attributes,
)

STEPS = 0.3
"""Steps of a student, relative to the training of its teacher."""

_TEACHER = "teacher_probabilities"

Record = dict[str, torch.Tensor]


def distill(
    la: Any,
    trainer: Any,
    unlabelled: Any = "swapped",
    adapter_name: str = "calibrated",
    *,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> str:
    """Train an ordinary adapter whose own probabilities are those of the posterior.

    The student begins as a copy of the posterior's adapter, on the same base model. The trainer
    trains it on the posterior's probabilities (link "mean_field") of the training texts and of
    texts without labels, by the Kullback-Leibler divergence, for 30 % of the training's steps and
    without dropout, which would blur what is smooth already. Where the adapter has a head of its
    own, as classifiers do, the student's is divided by the best temperature and frozen: a student
    that starts much more confident than its teacher loses accuracy. The result is an ordinary LoRA
    adapter, to be merged, quantised and served without this library: `model.set_adapter(name)`.

    With `class_token_ids`, the answers' tokens share the probability that the trained model gives
    them all together, so that greedy decoding still answers.

    Parameters
    ----------
    trainer : transformers.Trainer
        the one that has trained the model. It, the active adapter and all random states are the
        same afterwards
    unlabelled : {"swapped"}, Dataset or None
        more texts to learn from: copies of the training texts in which 30 % of the tokens are
        swapped for those of other training texts, or a data set for the trainer's collator
    adapter_name : str, default="calibrated"
        of the student in the model, and of its folder in the trainer's `output_dir`
    generator : torch.Generator, optional
        for swapped tokens; if omitted, every call swaps the same
    progress_bar : bool, default=False

    Returns
    -------
    str
        `adapter_name`

    Raises
    ------
    ValueError
        If the posterior predicts no classes, the trainer has trained another model or can't train
        again (see `check_trainer`), there is an adapter of that name, or there are no texts.

    References
    ----------
    Hinton, Vinyals & Dean, "Distilling the knowledge in a neural network", arXiv:1503.02531 (2015).
    """
    check_trainer(trainer)
    peft_model = find_peft_model(la.model)
    if la.likelihood != "classification":
        raise ValueError(f"A student learns class probabilities, and {la.likelihood} has none.")
    if find_peft_model(trainer.model) is not peft_model:
        raise ValueError("Pass the trainer of the posterior's model: this one has another.")
    folder = Path(trainer.args.output_dir)
    with restored(trainer), own_adapter_back(peft_model):
        teacher = getattr(la, "members", [la])[0].blocks[0].adapter
        if peft_model.active_adapter != teacher:
            peft_model.set_adapter(teacher)
        add_fresh_adapter(peft_model, adapter_name)
        of_teacher = own_weights(peft_model, teacher)
        for name, weight in own_weights(peft_model, adapter_name).items():
            weight.data.copy_(of_teacher[name].data)
        records, logits = [], []
        head = _head(peft_model, adapter_name, la.model.output_size)
        batches = _texts(la.model, trainer, unlabelled, generator)
        for batch in tqdm.tqdm(batches, "[Teacher's probabilities]", disable=not progress_bar):
            records += _taught(la, batch)
            if head:
                with la.model.prepared(), torch.no_grad():
                    logits.append(la.model(batch).cpu())
        if head:
            scale = _best_scale(torch.cat(logits), torch.stack([r[_TEACHER] for r in records]))
            for weight in head:
                weight.requires_grad_(False).mul_(scale)
        with _without_dropout(peft_model), _teaching(trainer, la.model):
            train(trainer, records, STEPS, folder / adapter_name)
        if trainer.args.should_save:
            write_adapter(peft_model, adapter_name, {}, folder)
    return adapter_name


def _head(model: PeftModel, adapter: str, n_outputs: int) -> list[nn.Parameter]:
    """An adapter's own weights of the layer that makes the logits, if it has any."""
    own, size = f".modules_to_save.{adapter}.", (n_outputs,)
    return [w for name, w in model.named_parameters() if own in name and w.shape[:1] == size]


def _best_scale(logits: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The number of which times logits `(N, C)` are nearest to probabilities `(N, C)`."""

    def divergence(logarithm: float) -> float:
        log_p = (logits * math.exp(logarithm)).log_softmax(-1)
        return kl_div(log_p, probabilities, reduction="batchmean").item()

    found: Any = minimize_scalar(divergence, bounds=(-math.log(1e3), math.log(10)))
    return math.exp(found.x)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    rates = [module.p for module in dropouts]
    for module in dropouts:
        module.p = 0.0
    try:
        yield
    finally:
        for module, rate in zip(dropouts, rates, strict=True):
            module.p = rate


def _texts(
    model: LogitsModel, trainer: Any, unlabelled: Any, generator: torch.Generator | None
) -> Iterator[Any]:
    """Batches without labels: training texts, and more."""
    if isinstance(unlabelled, str) and unlabelled != "swapped":
        raise ValueError(f'unlabelled must be "swapped", texts or None, not {unlabelled!r}.')
    batches = [model.inputs(b) for _, b in named_batches(loader_of(trainer, trainer.train_dataset))]
    yield from batches
    if isinstance(unlabelled, str):
        texts = [text for batch in batches if (text := model.text(batch)) is not None]
        if texts and model.transformer is not None:
            generator = generator or torch.Generator().manual_seed(0)
            yield from map(Swapping(texts, model.transformer, generator), texts)
    elif unlabelled is not None:
        for _, batch in named_batches(loader_of(trainer, unlabelled)):
            yield model.inputs(batch)


@torch.no_grad()
def _taught(la: Any, batch: Any) -> Iterator[Record]:
    """A batch's texts without padding and labels, in main memory, with probabilities to learn."""
    probabilities = la(batch, link_approx="mean_field")
    if la.model.class_token_ids is not None:  # the tokens of all answers keep their share
        log_p = []
        for member in getattr(la, "members", [la]):
            with member.model.prepared():
                log_p.append(member.model.log_probs(batch))
        others = torch.stack(log_p)[..., -1:].exp().mean(0)
        probabilities = torch.cat([(1 - others) * probabilities, others], dim=1)
    mask, labels = batch.get("attention_mask"), {la.model.dict_key_y, "label", "labels"}
    for row, targets in enumerate(probabilities.cpu()):
        record = {_TEACHER: targets}
        for key, value in batch.items():
            if isinstance(value, torch.Tensor) and key not in labels:
                value = value[row]
                if mask is not None and value.shape[:1] == mask[row].shape:
                    value = value[mask[row].bool()]  # without padding
                record[key] = value.cpu()
        yield record


@contextmanager
def _teaching(trainer: Any, model: LogitsModel) -> Iterator[None]:
    """Within, a trainer's steps have a student's loss, and batches of taught texts.

    What its training reads is changed while it makes its loader and in a step alone, so that
    evaluations between the steps have the user's own loss, collator and columns.
    """
    padding = pad_token(model.transformer) or 0
    students: dict[int, LogitsModel] = {}
    make_loader, take_step = trainer.get_train_dataloader, trainer.training_step

    def compute_loss(run: Any, inputs: Any, **kwargs: Any) -> torch.Tensor:
        targets = inputs.pop(_TEACHER)
        if id(run) not in students:  # once: the trainer may have wrapped the model
            answers = model.class_token_ids, model.dict_key_y, model.mask_token_id
            students[id(run)] = LogitsModel(run, *answers)
        log_p = students[id(run)].log_probs(inputs)
        return kl_div(log_p, targets.to(log_p), reduction="batchmean")

    def collate(records: Sequence[Record]) -> Record:
        columns = {key: [record[key] for record in records] for key in records[0]}
        return {
            key: torch.stack(values)
            if len({value.shape for value in values}) == 1
            else pad_sequence(
                values, batch_first=True, padding_value=padding if key == "input_ids" else 0
            )
            for key, values in columns.items()
        }

    def get_train_dataloader() -> Any:
        args = copy(trainer.args)
        args.remove_unused_columns = False
        with with_attributes(trainer, args=args, data_collator=collate):
            return make_loader()

    def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        with with_attributes(
            trainer,
            compute_loss=compute_loss,
            compute_loss_func=None,
            model_accepts_loss_kwargs=False,
            loss_is_scaled_for_ga=False,  # the trainer divides by accumulated steps
        ):
            return take_step(*args, **kwargs)

    with with_attributes(
        trainer, get_train_dataloader=get_train_dataloader, training_step=training_step
    ):
        yield
