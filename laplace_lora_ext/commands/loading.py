"""Load an adapter with its base model, tokenizer and classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import (
    AutoPeftModelForCausalLM,
    AutoPeftModelForSequenceClassification,
    PeftConfig,
    PeftModel,
    load_peft_weights,
)
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerBase

import laplace_lora_ext
from laplace_lora_ext.commands.arguments import ModelArguments
from laplace_lora_ext.commands.texts import (
    Batches,
    Classes,
    Row,
    UsageError,
    column_of,
    read_rows,
)
from laplace_lora_ext.messages import check_counts


@dataclass(frozen=True)
class Loaded:
    """What the commands need of an adapter."""

    model: PeftModel
    batches: Batches
    classes: Classes
    class_texts: list[str] | None  # a causal language model's answers
    arguments: ModelArguments

    def texts(self, source: str) -> list[str]:
        """Read texts alone."""
        return self._texts_of(read_rows(source), source)

    def labelled_texts(
        self,
        source: str,
    ) -> tuple[list[str], list[int]]:
        """Read texts, and their labels as numbers of classes."""
        rows = read_rows(source)
        labels = column_of(rows, self.arguments.label_column, source)
        numbers = [self.classes.number_of(label, source) for label in labels]
        return self._texts_of(rows, source), numbers

    def labelled_batches(self, source: str) -> DataLoader:
        """Make batches of texts with labels."""
        texts, labels = self.labelled_texts(source)
        return self.batches(texts, labels)

    def _texts_of(
        self,
        rows: Sequence[Row],
        source: str,
    ) -> list[str]:
        return [
            str(text) for text in column_of(rows, self.arguments.text_column, source)
        ]

    def new_posterior(self) -> laplace_lora_ext.LoRALaplace:
        """Make a posterior that is not fitted yet."""
        return laplace_lora_ext.Laplace(
            self.model,
            "classification",
            class_texts=self.class_texts,
            tokenizer=self.batches.tokenizer,
        )

    def posterior(self, folder: str | None) -> laplace_lora_ext.LoRALaplace:
        """Load the posterior from a folder, by default the adapter's."""
        place = folder or self.arguments.adapter
        try:
            la = laplace_lora_ext.from_pretrained(self.model, place)
        except FileNotFoundError as error:
            raise UsageError(
                f"{place} holds no posterior: make one by laplace-lora calibrate."
            ) from error
        if la.likelihood != "classification":
            raise UsageError(
                f"The posterior in {place} is of {la.likelihood}: the command line "
                "knows texts of one class each; predict by "
                "laplace_lora_ext.from_pretrained in Python."
            )
        return la


def load(arguments: ModelArguments) -> Loaded:
    """Load an adapter with all that goes with it."""
    check_counts(batch_size=arguments.batch_size)
    if arguments.max_length is not None:
        check_counts(max_length=arguments.max_length)
    try:
        config = PeftConfig.from_pretrained(arguments.adapter)
    except (ValueError, OSError) as error:
        raise UsageError(
            f"{arguments.adapter} holds no adapter: pass a folder with "
            "adapter_config.json, or an adapter's name on the hub."
        ) from error
    keywords = _settings_of(arguments, config)
    tokenizer = _tokenizer(arguments, config)
    if str(config.task_type).endswith("CAUSAL_LM"):
        if not arguments.answers:
            raise UsageError(
                'A causal language model needs --answers, such as A B C D, or " yes" " '
                'not at all".'
            )
        model = AutoPeftModelForCausalLM.from_pretrained(arguments.adapter, **keywords)
        class_texts = list(arguments.answers)
        names = [answer.strip() for answer in class_texts]  # as labels are written
        if not all(names):
            raise UsageError(
                f"An answer has no text among {class_texts}: leave it out of --answers."
            )
    else:
        keywords["num_labels"] = _number_of_classes(arguments)
        model = AutoPeftModelForSequenceClassification.from_pretrained(
            arguments.adapter, **keywords
        )
        names, class_texts = _class_names(model, arguments), None
        if model.config.pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
    model.eval()
    batches = Batches(tokenizer, arguments.batch_size, arguments.max_length)
    return Loaded(model, batches, Classes(names), class_texts, arguments)


def _settings_of(arguments: ModelArguments, config: PeftConfig) -> dict[str, Any]:
    """Collect the keywords of `from_pretrained`."""
    dtype = getattr(torch, arguments.dtype, None)
    if arguments.dtype != "auto" and not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"--dtype {arguments.dtype} is no precision: pass auto, float32, bfloat16 "
            "or float16."
        )
    settings: dict[str, Any] = {"dtype": arguments.dtype}
    if arguments.device_map is not None:
        settings["device_map"] = arguments.device_map
    if arguments.load_in_4bit:
        # Trained heads stay as they are: four bits take no gradient. Of what
        # transformers would leave out by itself, such as a language model's output
        # layer, None takes nothing away.
        heads = getattr(config, "modules_to_save", None)
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, llm_int8_skip_modules=heads
        )
    return settings


def _tokenizer(
    arguments: ModelArguments, config: PeftConfig
) -> PreTrainedTokenizerBase:
    """Load the adapter's tokenizer or, where it has none, the base model's."""
    for place in (arguments.adapter, config.base_model_name_or_path):
        try:
            tokenizer = AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError, KeyError):
            continue
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer
    raise UsageError(
        f"Neither {arguments.adapter} nor {config.base_model_name_or_path} has a "
        "tokenizer: save it beside the adapter by tokenizer.save_pretrained."
    )


def _number_of_classes(arguments: ModelArguments) -> int:
    """Read the number of classes off the saved head.

    Configurations of adapters don't have it.
    """
    weights = load_peft_weights(arguments.adapter, device="cpu")
    heads = [
        weight
        for name, weight in weights.items()
        if ".lora_" not in name and name.endswith(".weight") and weight.ndim == 2
    ]
    if heads:
        return len(heads[-1])  # the last layer makes the logits
    if arguments.class_names:
        return len(arguments.class_names)
    raise UsageError(
        f"{arguments.adapter} was saved without a classifier's head: save it by "
        'task_type="SEQ_CLS" or modules_to_save, or pass --class_names if the base '
        "model has one."
    )


def _class_names(model: PeftModel, arguments: ModelArguments) -> list[str]:
    """Name the classes, in the order of the outputs."""
    names: Sequence[str]
    known = model.config.id2label
    names = arguments.class_names or [known[number] for number in sorted(known)]
    if len(names) != model.config.num_labels:
        raise UsageError(
            f"--class_names has {len(names)} names, and the model has "
            f"{model.config.num_labels} classes."
        )
    return list(names)


def check_new(output: str, overwrite: bool, advice: str) -> Path:
    """Refuse an output that exists, unless it may be replaced."""
    path = Path(output)
    if path.exists() and not overwrite:
        raise UsageError(f"{output} exists: {advice}.")
    return path
