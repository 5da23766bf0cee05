"""Pretrained models and tokenizers, by their names on the hub or from folders."""

from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.calibration.task_data import MissingDataError
from benchmarks.calibration.text_task import TextTask


def load_pretrained_model(
    name: str | Path, task: TextTask, dtype: torch.dtype, in_8bit: bool, device: str
) -> torch.nn.Module:
    """Load any model of transformers for a task.

    Parameters
    ----------
    name : str or Path
        Name on the hub, or folder.
    task : TextTask
        Says whether the model is to be a causal language model or a classifier.
    dtype : torch.dtype
        Of the weights.
    in_8bit : bool
        Whether to quantise the weights to 8 bits with bitsandbytes.
    device : str
        Device to load to.

    Returns
    -------
    model : torch.nn.Module
        The model.
    """
    # The report on loading would warn of the new head, which is meant to be new.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options: dict[str, Any] = {"torch_dtype": dtype}
    if in_8bit:
        options["quantization_config"] = transformers.BitsAndBytesConfig(load_in_8bit=True)
        options["device_map"] = {"": device}
    model: Any
    if task.is_prompt:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, **options)
    else:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=len(task.classes), **options
        )
    return model if in_8bit else model.to(device)


def load_tokenizer(name: str | Path, task: TextTask) -> Any:
    """Load the tokenizer of any model of transformers.

    Parameters
    ----------
    name : str or Path
        Name on the hub, or folder.
    task : TextTask
        Says at which side texts are cut.

    Returns
    -------
    tokenizer : transformers.PreTrainedTokenizerBase
        With a padding token.

    Raises
    ------
    MissingDataError
        Where there is neither a folder nor access to the hub; the message says what to download.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise MissingDataError(
            f"The model {name} is no folder of a model and the hub is out of reach: download "
            f"https://huggingface.co/{name}, and give --model FOLDER."
        ) from error
    tokenizer.truncation_side = task.truncation_side
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
