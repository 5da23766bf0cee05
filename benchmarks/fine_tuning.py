"""The one fine-tuning: LoRA layers in a task's model, checkpoints, held-out texts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.models import (
    AdaptedModel,
    LogitsModel,
    device_of,
    find_weights,
    load_model,
    load_tokenizer,
)
from benchmarks.options import SeveralSeeds
from benchmarks.tasks import TASKS
from benchmarks.tasks.task import Example, Task
from benchmarks.training import (
    MAXIMUM_LIKELIHOOD,
    Checkpoints,
    Hyperparameters,
    Recipe,
    Records,
    as_dataset,
    read_or_train,
    train,
)
from laplace_lora_ext import DataCollatorForChoices
from laplace_lora_ext.processes.shards import divide

MEMBER_SEEDS = 1000  # from one member of an ensemble to the next
# Texts in a batch of predictions: an accelerator takes many for the time of a few.
PREDICTION_BATCH_SIZE = 8
PREDICTION_BATCH_SIZE_ON_ACCELERATOR = 16
# Options that replace a hyperparameter of the same name.
OVERRIDES = ("steps", "learning_rate", "batch_size", "maximum_length", "checkpoints")
TRAIN = "train"
TEST = "test"
HELD = "held-out texts"
# The same for every method, ours and rivals, that wants labels to choose by.
HELD_OUT = 0.2
NO_CLASS = -1  # label of a text for which no class is right


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model, from a folder or the hub, to be fine-tuned on a task."""

    task: Task
    hyperparameters: Hyperparameters
    tokenizer: Any
    folder: str | Path
    options: SeveralSeeds

    @property
    def device(self) -> str:
        """Name the device of the model and the batches."""
        return device_of(self.options.device)

    def load(self) -> Any:
        """Load the model, with a new head if it is an encoder."""
        # Loading would warn of the new head, which is meant to be new.
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        dtype = getattr(torch, self.options.dtype)
        if self.task.is_prompt:
            model = load_model(
                transformers.AutoModelForCausalLM, self.folder, torch_dtype=dtype
            )
        else:
            model = load_model(
                transformers.AutoModelForSequenceClassification,
                self.folder,
                torch_dtype=dtype,
                num_labels=len(self.task.classes),
            )
        return model.to(self.device)

    @property
    def task_type(self) -> TaskType:
        """Name the kind of the model for PEFT."""
        return TaskType.CAUSAL_LM if self.task.is_prompt else TaskType.SEQ_CLS

    @property
    def has_head(self) -> bool:
        """Tell whether a head is trained beside the LoRA weights."""
        return not self.task.is_prompt

    @property
    def class_token_ids(self) -> list[int] | None:
        """List the tokens of a language model's answers, if all prompts share them."""
        if not self.task.is_prompt or self.task.has_choices:
            return None
        beginning = self._tokens_of("Answer:")
        last_tokens = []
        for answer in self.task.classes:
            # A tokenizer may join the space and the answer, so the two are read
            # together.
            tokens = self._tokens_of(f"Answer: {answer}")
            if len(tokens) != len(beginning) + 1:
                raise ValueError(
                    f"The answer {answer!r} is not one token of this model."
                )
            last_tokens.append(tokens[-1])
        return last_tokens

    def _tokens_of(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @cached_property
    def data(self) -> dict[str, Records]:
        """Tokenize the texts of each data set."""
        data = {TRAIN: self.records(self.task.train)}
        predicted = {TEST: self.task.test, **self.task.shifted}
        for name, examples in predicted.items():
            # Texts of about the same length in a batch need little padding.
            data[name] = sorted(self.records(examples), key=_length)
        return data

    @property
    def description(self) -> dict[str, Any]:
        """Describe the task in figures."""
        task = self.task
        return {
            "name": task.name,
            "classes": list(task.classes),
            TRAIN: len(task.train),
            TEST: len(task.test),
            "shifted": {name: len(examples) for name, examples in task.shifted.items()},
        }

    @property
    def figures(self) -> dict[str, Any]:
        """Describe what figures of a training depend on: its task and its settings."""
        return {
            "task": self.description,
            "hyperparameters": asdict(self.hyperparameters),
        }

    def records(self, examples: Sequence[Example]) -> Records:
        """Tokenize texts or pairs of texts, with their labels if they have any."""
        records = []
        for example in examples:
            record = self._record(example)
            if example.label is not None:
                record["labels"] = example.label
            records.append(record)
        return records

    def _record(self, example: Example) -> dict[str, Any]:
        """Tokenize a text; a prompt with choices stays as it is for the collator."""
        text = example.text
        if example.choices is not None:
            return {"prompt": text, "choices": list(example.choices)}
        texts = [text] if isinstance(text, str) else text
        record = self.tokenizer(
            *texts,
            truncation=True,
            max_length=self.hyperparameters.maximum_length,
            return_token_type_ids=False,
        )
        return dict(record)

    def prediction_loader(self, records: Records) -> DataLoader:
        """Make batches to be predicted, of a size for the device."""
        if torch.device(self.device).type == "cpu":
            return self.loader(records, PREDICTION_BATCH_SIZE)
        return self.loader(records, PREDICTION_BATCH_SIZE_ON_ACCELERATOR)

    def loader(self, records: Records, batch_size: int | None = None) -> DataLoader:
        """Make batches of records in their order."""
        return DataLoader(
            as_dataset(records),
            batch_size=batch_size or self.hyperparameters.batch_size,
            collate_fn=self._collate,
        )

    def shuffled_loader(self, records: Records, seed: int) -> DataLoader:
        """Make batches of records for a training, in orders that the seed decides."""
        return DataLoader(
            as_dataset(records),
            batch_size=self.hyperparameters.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(seed),
            collate_fn=self._collate,
        )

    def _collate(self, records: Records) -> transformers.BatchEncoding:
        """Join records to a batch on the device: stock classes don't move batches."""
        return transformers.BatchEncoding(self.collator(records)).to(self.device)

    @property
    def collator(self) -> Any:
        """Choose what pads records to a batch."""
        if self.task.has_choices:
            return DataCollatorForChoices(
                self.tokenizer, self.hyperparameters.maximum_length
            )
        return transformers.DataCollatorWithPadding(self.tokenizer)

    def train_or_read(
        self,
        model: LogitsModel,
        records: Records,
        settings: Hyperparameters,
        seed: int,
        recipe: Recipe = MAXIMUM_LIKELIHOOD,
    ) -> Checkpoints:
        """Train by maximum likelihood, or read an earlier, equal training."""

        def loss_of(batch: Any) -> Tensor:
            return recipe.loss(model, batch, batch["labels"])

        def trained() -> Checkpoints:
            return train(
                model.model,
                self.shuffled_loader(records, seed),
                loss_of,
                settings,
                show_progress=not self.options.quiet,
                recipe=recipe,
            )

        key = [asdict(settings), records, seed, recipe.name]
        return read_or_train(model.model, key, self.options.cache, trained)


class Split(NamedTuple):
    """Training texts: those that are trained on, and those that are held out."""

    rest: Records
    held: Records


def held_out(pretrained: Pretrained) -> Split:
    """Hold out a fifth of each class, so that none is missing where there are few."""
    records = pretrained.data[TRAIN]
    batches = pretrained.loader(records)
    # Our draws have no copies, but for one text in 1,540 of banking77.
    division = divide(batches, HELD_OUT, labels_of(records), torch.arange(len(records)))
    return Split(list(division.rest), list(division.held))


def labels_of(records: Records) -> Tensor:
    """Collect the labels `(texts,)` of records, `NO_CLASS` where they have none."""
    return torch.tensor([record.get("labels", NO_CLASS) for record in records])


def _length(record: dict[str, Any]) -> int:
    tokens_or_characters = (
        record["input_ids"] if "input_ids" in record else record["prompt"]
    )
    return len(tokens_or_characters)


def prepare(options: SeveralSeeds, seed: int) -> Pretrained:
    """Read the task that the options ask for, and find its model."""
    if options.task not in TASKS:
        raise SystemExit(
            f"Unknown task {options.task!r}; there are {', '.join(TASKS)}."
        )
    source = TASKS[options.task]
    task = source.read(options, seed)
    settings: Hyperparameters = source.hyperparameters
    folder = find_weights(settings.model, options)
    if isinstance(folder, str):  # its name on the hub, or the folder that was asked for
        settings = replace(settings, model=folder)
    return Pretrained(
        task=task,
        hyperparameters=settings.asked(options, OVERRIDES),
        tokenizer=load_tokenizer(folder, task.truncation_side),
        folder=folder,
        options=options,
    )


def with_lora(
    base: Any,
    settings: Hyperparameters,
    task_type: TaskType,
    recipe: Recipe = MAXIMUM_LIKELIHOOD,
) -> Any:
    """Add LoRA layers to a model, ready for training."""
    lora = LoraConfig(
        task_type=task_type,
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules),
    )
    return get_peft_model(base, recipe.adapters(lora))


def untrained(
    pretrained: Pretrained, seed: int, recipe: Recipe = MAXIMUM_LIKELIHOOD
) -> Any:
    """Load the pretrained model with new LoRA layers."""
    # LoRA's first weights are drawn, and those of a new head.
    transformers.set_seed(seed)
    return with_lora(
        pretrained.load(), pretrained.hyperparameters, pretrained.task_type, recipe
    )


def fine_tune(
    pretrained: Pretrained,
    records: Records,
    seed: int,
    recipe: Recipe = MAXIMUM_LIKELIHOOD,
) -> AdaptedModel:
    """Fine-tune LoRA weights, and an encoder's head, by maximum likelihood."""

    @cache
    def another(number: int) -> AdaptedModel:
        return fine_tune(pretrained, records, seed + MEMBER_SEEDS * number)

    def retrained(recipe: Recipe) -> AdaptedModel:
        return fine_tune(pretrained, records, seed, recipe)

    model = untrained(pretrained, seed, recipe)
    recipe.prepare(model)
    adapted = AdaptedModel(
        model, pretrained.class_token_ids, another=another, retrained=retrained
    )
    checkpoints = pretrained.train_or_read(
        adapted.logits_model, records, pretrained.hyperparameters, seed, recipe
    )
    # The next random numbers are the same for weights that were trained and that were
    # read.
    transformers.set_seed(seed)
    return replace(adapted, checkpoints=checkpoints)
