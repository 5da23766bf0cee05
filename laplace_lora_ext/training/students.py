"""A student: an adapter that learns a posterior's probabilities, and needs no posterior itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
import tqdm
from torch.nn.functional import kl_div
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from laplace_lora_ext.models.adapters import (
    add_fresh_adapter,
    find_peft_model,
    own_adapter_back,
    write_adapter,
)
from laplace_lora_ext.models.batches import named_batches, pad_token
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.swapping import Swapping, special_tokens
from laplace_lora_ext.training.trainers import check_trainer, loader_of, restored, train

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
    texts without labels, by the Kullback-Leibler divergence, for 30 % of the training's steps. What
    comes of it is a LoRA adapter like any other, to be merged, quantised and served without this
    library: `model.set_adapter(name)`.

    With `class_token_ids`, the answers' tokens share the probability that the trained model gives
    them all together, so that greedy decoding still answers.

    Parameters
    ----------
    trainer : transformers.Trainer
        the one that has trained the model. It, the active adapter and all random states are the
        same afterwards
    unlabelled : {"swapped"}, Dataset, DataLoader or None
        more texts to learn from: copies of the training texts in which 30 % of the tokens are
        swapped for those of other training texts, a data set for the trainer's collator, or ready
        batches
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
    members: Sequence[Any] = getattr(la, "members", [la])
    peft_model = find_peft_model(la.model)
    if la.likelihood != "classification":
        raise ValueError(f"A student learns class probabilities, and {la.likelihood} has none.")
    if find_peft_model(trainer.model) is not peft_model:
        raise ValueError("The trainer has trained another model than that of the posterior.")
    folder = Path(trainer.args.output_dir)
    with restored(trainer), own_adapter_back(peft_model):
        teacher = members[0].blocks[0].adapter
        if peft_model.active_adapter != teacher:
            peft_model.set_adapter(teacher)
        add_fresh_adapter(peft_model, adapter_name)
        _copy(peft_model, teacher, adapter_name)
        texts = loader_of(trainer, trainer.train_dataset)
        batches = _texts(la.model, texts, trainer, unlabelled, generator)
        records = _taught(la, members, batches, progress_bar)
        _prepare(trainer, la.model)
        train(trainer, records, STEPS, folder / adapter_name)
        if trainer.args.should_save:
            write_adapter(peft_model, adapter_name, {}, folder)
    return adapter_name


def _copy(model: Any, teacher: str, student: str) -> None:
    """Give an adapter another's weights and heads."""
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        source = weights.get(name.replace(f".{student}", f".{teacher}"))
        if f".{student}" in name and source is not None:
            weight.data.copy_(source.data)


def _texts(
    model: LogitsModel,
    texts: Iterable[Any],
    trainer: Any,
    unlabelled: Any,
    generator: torch.Generator | None,
) -> Iterator[Any]:
    """Batches without labels: training texts, and more."""
    for _, batch in named_batches(texts):
        yield model.inputs(batch)
    if isinstance(unlabelled, str):
        if unlabelled != "swapped":
            raise ValueError(f'unlabelled must be "swapped", texts or None, not {unlabelled!r}.')
        yield from _swapped(model, texts, generator or torch.Generator().manual_seed(0))
    elif unlabelled is not None:
        is_loader = isinstance(unlabelled, DataLoader)
        for _, batch in named_batches(unlabelled if is_loader else loader_of(trainer, unlabelled)):
            yield model.inputs(batch)


def _swapped(
    model: LogitsModel, texts: Iterable[Any], generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Copies of texts with swapped tokens; none of what has no tokens."""
    batches = [text for _, batch in named_batches(texts) if (text := model.text(batch)) is not None]
    if not batches or model.transformer is None:
        return
    pairs = ((text["input_ids"], text.get("attention_mask")) for text in batches)
    swap = Swapping(pairs, special_tokens(model.transformer))
    for text in batches:
        ids = swap(text["input_ids"], text.get("attention_mask"), generator)
        yield {**text, "input_ids": ids}


def _taught(
    la: Any, members: Sequence[Any], batches: Iterable[Any], progress_bar: bool
) -> list[Record]:
    """Each text with its teacher's probabilities."""
    records = []
    for batch in tqdm.tqdm(batches, "[Teacher's probabilities]", disable=not progress_bar):
        probabilities = la(batch, link_approx="mean_field").detach()
        if la.model.class_token_ids is not None:
            others = torch.stack([_of_others(member.model, batch) for member in members]).mean(0)
            probabilities = torch.cat([(1 - others) * probabilities, others], dim=1)
        for record, row in zip(_rows(batch, la.model), probabilities.cpu(), strict=True):
            records.append(record | {_TEACHER: row})
    if not records:
        raise ValueError("The trainer's data have no texts.")
    return records


@torch.no_grad()
def _of_others(model: LogitsModel, batch: Any) -> torch.Tensor:
    """Probability `(B, 1)` that a language model gives all tokens but the answers'."""
    with model.prepared():
        return model.log_probs(batch)[:, -1:].exp()


def _rows(batch: Mapping[str, torch.Tensor], model: LogitsModel) -> Iterator[Record]:
    """The texts of a batch, without padding and labels, in main memory."""
    mask, labels = batch.get("attention_mask"), {model.dict_key_y, "label", "labels"}
    tensors = {
        k: v.cpu() for k, v in batch.items() if isinstance(v, torch.Tensor) and k not in labels
    }
    for row in range(len(next(iter(tensors.values())))):
        real = slice(None) if mask is None or mask.ndim != 2 else mask[row].cpu().bool()
        yield {
            key: value[row][real]
            if mask is not None and value.shape[:2] == mask.shape
            else value[row]
            for key, value in tensors.items()
        }


def _prepare(trainer: Any, model: LogitsModel) -> None:
    """Give a trainer a student's loss, and a collator for taught texts."""
    padding = pad_token(model.transformer) or 0
    students: dict[int, LogitsModel] = {}

    def compute_loss(run: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if _TEACHER not in inputs:  # of evaluation
            return type(trainer).compute_loss(trainer, run, inputs, return_outputs, **kwargs)
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

    trainer.compute_loss, trainer.data_collator = compute_loss, collate
    trainer.model_accepts_loss_kwargs = False  # so that the trainer divides by accumulated steps
    trainer.args = copy(trainer.args)
    trainer.args.remove_unused_columns = False
