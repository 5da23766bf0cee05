"""Load an adapter with its base model, tokenizer and classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.utils import enable_progress_bars
from peft import PeftConfig, PeftModel, TaskType, load_peft_weights
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

import laplace_lora_ext
from laplace_lora_cli import (
    LABEL,
    TEXT,
    ModelArguments,
    PosteriorArguments,
    TextArguments,
)
from laplace_lora_ext.commands.texts import (
    Row,
    column_of,
    fingerprints,
    numbers_of,
    read_rows,
)
from laplace_lora_ext.messages import listed, warn
from laplace_lora_ext.models.choices import class_tokens
from laplace_lora_ext.saving import read_state

_CLASSES = ("class_names", "answers")  # options that a fit depends on


@dataclass(frozen=True)
class Loaded:
    """What the commands need of an adapter."""

    model: PeftModel
    tokenizer: PreTrainedTokenizerBase
    class_names: list[str]
    arguments: ModelArguments

    def texts(self, source: str) -> tuple[list[Row], list[str]]:
        """Read rows, and the texts in them."""
        rows = read_rows(source)
        texts = column_of(rows, self.arguments.text_column or TEXT, source)
        if self.arguments.max_length is None:
            self._check_lengths(texts, source)
        return rows, texts

    def _check_lengths(self, texts: list[str], source: str) -> None:
        """Refuse texts for which the model may have no positions."""
        of_model = getattr(self.model.config, "max_position_embeddings", math.inf)
        longest = min(of_model, self.tokenizer.model_max_length)
        for number, ids in enumerate(self.encoded(texts)["input_ids"], start=1):
            if len(ids) > longest:
                raise ValueError(
                    f"Row {number} of {source} has {len(ids)} tokens, and the model "
                    f"takes {longest}: pass --max_length {longest} to cut such texts."
                )

    def labelled_texts(self, source: str) -> tuple[list[str], list[int]]:
        """Read texts, and their labels as numbers of classes."""
        rows, texts = self.texts(source)
        labels = column_of(rows, self.arguments.label_column or LABEL, source)
        return texts, numbers_of(labels, self.class_names, source)

    def unseen_texts(
        self, source: str, trained_on: Tensor
    ) -> tuple[list[str], list[int]]:
        """Read labelled texts without those that the model was trained on.

        Of these it knows the answers, so that they would prove too much.
        """
        texts, labels = self.labelled_texts(source)
        is_new = (~torch.isin(fingerprints(texts), trained_on)).tolist()
        if not any(is_new):
            raise ValueError(
                f"All {len(texts)} texts of {source} are training texts, of which the "
                "model knows the answers: pass others."
            )
        if not all(is_new):
            warn(
                f"{is_new.count(False)} of {len(texts)} texts of {source} are training "
                "texts too, and are left out."
            )
        return list(compress(texts, is_new)), list(compress(labels, is_new))

    def encoded(self, texts: str | list[str], **options: Any) -> Any:
        """Tokenize a text or several, cut at `max_length`."""
        return self.tokenizer(
            texts,
            truncation=self.arguments.max_length is not None,
            max_length=self.arguments.max_length,
            **options,
        )

    def batches(
        self, texts: Sequence[str], labels: Sequence[int] | None = None
    ) -> DataLoader:
        """Make a loader that reads the texts in order."""

        def collate(places: Sequence[int]) -> Any:
            of_batch = [texts[place] for place in places]
            encoded = self.encoded(of_batch, padding=True, return_tensors="pt")
            if labels is not None:
                encoded["labels"] = torch.tensor([labels[place] for place in places])
            return encoded

        # Any sequence will do, whatever the loader's annotation says.
        places = cast(Dataset[int], range(len(texts)))
        return DataLoader(
            places, batch_size=self.arguments.batch_size, collate_fn=collate
        )

    def metadata(self) -> dict[str, Any]:
        """Say how texts and labels have been read, for a posterior's file."""
        given = {
            field.name: getattr(self.arguments, field.name)
            for field in fields(TextArguments)
        }
        return given | {
            "class_names": self.class_names,
            "text_column": self.arguments.text_column or TEXT,
            "label_column": self.arguments.label_column or LABEL,
        }

    def posterior(self) -> laplace_lora_ext.LoRALaplace:
        """Load the posterior."""
        # Others than those of the fit are refused.
        answers = class_tokens(None, self.arguments.answers, self.tokenizer)
        return laplace_lora_ext.from_pretrained(
            self.model, posterior_folder(self.arguments), class_token_ids=answers
        )


def load(arguments: ModelArguments) -> Loaded:
    """Load an adapter with all that goes with it.

    What a posterior was fitted with need not be given again.
    """
    adapter = PeftConfig.from_pretrained(arguments.adapter)
    if isinstance(arguments, PosteriorArguments):
        arguments = _with_saved(arguments)
    tokenizer = _tokenizer(arguments, adapter)
    base = str(adapter.base_model_name_or_path)
    config = AutoConfig.from_pretrained(base, revision=adapter.revision)
    if adapter.task_type == TaskType.CAUSAL_LM:
        cls, known = AutoModelForCausalLM, arguments.answers
        if not known:
            raise ValueError(
                'A causal language model needs --answers, such as A B C D, or " yes" '
                '" not at all".'
            )
        # Answers stand behind a text, so that of a long one the beginning goes.
        tokenizer.truncation_side = "left"
    elif adapter.task_type in (TaskType.SEQ_CLS, None):
        cls = AutoModelForSequenceClassification
        # By their numbers: where keys were text, a file has "10" before "2".
        known = [name for _, name in sorted((config.id2label or {}).items())]
    else:
        raise ValueError(
            f"{arguments.adapter} is of the task {adapter.task_type}: the command line "
            "knows SEQ_CLS and CAUSAL_LM."
        )
    names = [name.strip() for name in arguments.class_names or known]
    if cls is AutoModelForSequenceClassification:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    try:
        model = _adapted(cls, config, arguments, adapter, len(tokenizer))
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise ValueError(
            f"The model's head is not one of {len(names)} classes, {', '.join(names)}: "
            f"pass --class_names, one for each of its outputs. ({error})"
        ) from error
    # Classifiers read a text at the last token that is no padding, and the tokenizer
    # pads. Not before, since it may be a token that the base lacks.
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    model.eval()
    return Loaded(model, tokenizer, names, arguments)


def _adapted(
    cls: Any, config: Any, arguments: ModelArguments, adapter: PeftConfig, n_tokens: int
) -> PeftModel:
    """Load a base model and its adapter, which may have tokens of its own."""
    base, found = cls.from_pretrained(
        adapter.base_model_name_or_path,
        config=config,
        output_loading_info=True,
        **_settings_of(arguments, adapter),
    )
    # What neither of them has would be random.
    own = load_peft_weights(arguments.adapter, device="cpu")
    missing = sorted(
        name for name in found["missing_keys"] if f"base_model.model.{name}" not in own
    )
    if missing:
        raise ValueError(
            f"Neither {arguments.adapter} nor its base model has {listed(missing)}: "
            'train the adapter with task_type="SEQ_CLS", which saves a head, or name '
            "its layers in modules_to_save."
        )
    if n_tokens > len(base.get_input_embeddings().weight):
        base.resize_token_embeddings(n_tokens)
    return PeftModel.from_pretrained(base, arguments.adapter)


def be_quiet() -> None:
    """Let transformers print errors and downloads alone, from now on."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    enable_progress_bars()  # of downloads, which may take minutes


def posterior_folder(arguments: ModelArguments) -> str:
    """Return where the posterior is, by default beside the adapter."""
    return getattr(arguments, "posterior", None) or arguments.adapter


def _with_saved(arguments: ModelArguments) -> ModelArguments:
    """Read texts as those of the posterior's fit, but for what is given.

    Other classes are refused. Columns and lengths are matters of a file.
    """
    place = posterior_folder(arguments)
    try:
        saved: Mapping[str, Any] = read_state(place).get("metadata", {})
    except FileNotFoundError as error:
        raise ValueError(
            f"{place} holds no posterior: make one by laplace-lora calibrate."
        ) from error
    for field in fields(TextArguments):
        if field.name not in saved:  # fitted in Python
            continue
        of_fit, given = saved[field.name], getattr(arguments, field.name)
        if given is None:
            arguments = replace(arguments, **{field.name: of_fit})
        elif field.name in _CLASSES and given != of_fit:
            raise ValueError(
                f"The posterior in {place} was fitted with --{field.name} {of_fit!r}, "
                f"and not {given!r}: leave it out."
            )
    return arguments


def _settings_of(arguments: ModelArguments, config: PeftConfig) -> dict[str, Any]:
    """Collect the keywords of `from_pretrained`."""
    settings: dict[str, Any] = {
        "revision": config.revision,
        "dtype": arguments.dtype,
        "device_map": arguments.device_map,
    }
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
    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.adapter)
    except (OSError, ValueError, KeyError):
        tokenizer = AutoTokenizer.from_pretrained(
            config.base_model_name_or_path, revision=config.revision
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_new(
    output: str, overwrite: bool, advice: str = "pass --overwrite, or another"
) -> Path:
    """Refuse an output that exists, unless it may be replaced."""
    path = Path(output)
    if path.exists() and not overwrite:
        raise ValueError(f"{output} exists: {advice} --output.")
    return path
