"""The one fine-tuning: a task's model gets LoRA layers, and is trained with checkpoints."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, TaskType, get_peft_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.models import AdaptedModel, LogitsModel, device_of, load_tokenizer
from benchmarks.options import TextRun
from benchmarks.tasks import TASKS
from benchmarks.tasks.task import Example, Task
from benchmarks.training import Hyperparameters, Recipe, Records, Weights, read_or_train, train

MEMBER_SEEDS = 1000  # from one member of an ensemble to the next
PREDICTION_BATCH_SIZE = 8
OVERRIDES = ("steps", "learning_rate", "batch_size", "maximum_length", "checkpoints")
TEST = "test"


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model, from a folder or the hub, to be fine-tuned on a task."""

    task: Task
    hyperparameters: Hyperparameters
    tokenizer: Any
    folder: str | Path
    options: Any  # of the experiment

    @property
    def device(self) -> str:
        return device_of(self.options.device)

    def load(self) -> Any:
        """Load the model, with a new head if it is an encoder."""
        # Loading would warn of the new head, which is meant to be new.
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        how: dict[str, Any] = {"torch_dtype": getattr(torch, self.options.dtype)}
        if self.task.is_prompt:
            kind: Any = transformers.AutoModelForCausalLM
        else:
            kind = transformers.AutoModelForSequenceClassification
            how["num_labels"] = len(self.task.classes)
        return kind.from_pretrained(self.folder, **how).to(self.device)

    @property
    def task_type(self) -> TaskType | None:
        """What PEFT is told of the model."""
        return TaskType.CAUSAL_LM if self.task.is_prompt else TaskType.SEQ_CLS

    @property
    def class_token_ids(self) -> list[int] | None:
        """The tokens of a causal language model's answers after a prompt."""
        if not self.task.is_prompt:
            return None
        texts = ["Answer:", *(f"Answer: {answer}" for answer in self.task.classes)]
        start, *answers = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        for answer, tokens in zip(self.task.classes, answers, strict=True):
            if len(tokens) != len(start) + 1:
                raise ValueError(f"The answer {answer!r} is not one token of this model.")
        return [tokens[-1] for tokens in answers]

    @cached_property
    def data(self) -> dict[str, Records]:
        """Tokenized texts by data set; texts that are only predicted are sorted, to pad little."""
        predicted = {TEST: self.task.test, **self.task.shifted}
        data = {name: self.records(examples) for name, examples in predicted.items()}
        for records in data.values():
            records.sort(key=lambda record: len(record["input_ids"]))
        return data | {"train": self.records(self.task.train)}

    @property
    def description(self) -> dict[str, Any]:
        """The task in figures."""
        task = self.task
        sizes = {name: len(getattr(task, name)) for name in ("train", TEST)}
        shifted = {name: len(examples) for name, examples in task.shifted.items()}
        return {"name": task.name, "classes": list(task.classes), **sizes, "shifted": shifted}

    def records(self, examples: Sequence[Example]) -> Records:
        """Tokens of texts or pairs of texts, with their labels if any."""
        records = []
        for text, label in examples:
            record = self.tokenizer(
                *([text] if isinstance(text, str) else text),
                truncation=True,
                max_length=self.hyperparameters.maximum_length,
                return_token_type_ids=False,
            )
            records.append({**record, **({} if label is None else {"labels": label})})
        return records

    def loader(
        self, records: Records | str, batch_size: int | None = None, generator: Any = None
    ) -> DataLoader:
        """Batches of records or of a data set, on the device: stock classes don't move them."""
        pad = transformers.DataCollatorWithPadding(self.tokenizer)
        return DataLoader(
            self.data[records] if isinstance(records, str) else records,  # pyright: ignore
            batch_size=batch_size or self.hyperparameters.batch_size,
            shuffle=generator is not None,
            generator=generator,
            collate_fn=lambda batch: transformers.BatchEncoding(pad(batch)).to(self.device),
        )

    def train_or_read(
        self,
        model: LogitsModel,
        loader: DataLoader,
        settings: Hyperparameters,
        seed: int,
        recipe: Recipe | None = None,
    ) -> dict[int, Weights]:
        """Train by maximum likelihood, or read the checkpoints of an earlier, equal training."""

        def trained() -> dict[int, Weights]:
            how: Any = (settings, not self.options.quiet, recipe)
            smooth: Any = {"label_smoothing": recipe.label_smoothing if recipe else 0.0}
            loss_of = lambda x: cross_entropy(model(x), x["labels"], **smooth)  # noqa: E731
            return train(model.model, loader, loss_of, *how)

        key = [asdict(settings), loader.dataset, seed, *([recipe.name] if recipe else [])]
        return read_or_train(model.model, key, self.options.cache, trained)


def prepare(options: TextRun, seed: int) -> Pretrained:
    """Read the task that the options ask for, and find its model."""
    if options.task not in TASKS:
        raise SystemExit(f"Unknown task {options.task!r}; there are {', '.join(TASKS)}.")
    source = TASKS[options.task]
    task = source.read(options, seed)
    folder = source.model(options)
    given: dict[str, Any] = {"model": folder} if isinstance(folder, str) else {}
    given |= {name: x for name in OVERRIDES if (x := getattr(options, name, None)) is not None}
    settings = replace(source.hyperparameters, **given)
    settings = replace(settings, warmup_steps=min(settings.warmup_steps, settings.steps))
    tokenizer = load_tokenizer(folder, task.truncation_side)
    return Pretrained(task, settings, tokenizer, folder, options)


def with_lora(base: Any, settings: Hyperparameters, task_type: TaskType | None) -> Any:
    """The model with LoRA layers, ready for training."""
    lora = LoraConfig(
        task_type=task_type,
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules),
    )
    return get_peft_model(base, lora)


def untrained(pretrained: Pretrained, seed: int) -> Any:
    """The pretrained model with new LoRA layers."""
    transformers.set_seed(seed)
    return with_lora(pretrained.load(), pretrained.hyperparameters, pretrained.task_type)


def fine_tune(
    pretrained: Pretrained, records: Records, seed: int, recipe: Recipe | None = None
) -> AdaptedModel:
    """Fine-tune LoRA weights, and an encoder's head, by maximum likelihood."""
    settings, model = pretrained.hyperparameters, untrained(pretrained, seed)
    if recipe is not None:
        recipe.prepare(model)
    adapted = AdaptedModel(
        model,
        pretrained.class_token_ids,
        another=cache(lambda number: fine_tune(pretrained, records, seed + MEMBER_SEEDS * number)),
        retrained=lambda recipe: fine_tune(pretrained, records, seed, recipe),
    )
    loader = pretrained.loader(records, generator=torch.Generator().manual_seed(seed))
    checkpoints = pretrained.train_or_read(adapted.logits_model, loader, settings, seed, recipe)
    transformers.set_seed(seed)  # the same for trained weights and cached ones
    return replace(adapted, checkpoints=checkpoints)
