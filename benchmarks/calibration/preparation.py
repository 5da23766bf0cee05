"""The model, its task and how it is fine-tuned, as the command line asks for them."""

import argparse
from dataclasses import replace

import torch

from benchmarks.calibration.docstring_tasks import (
    DOCSTRING_TASKS,
    Sizes,
    read_docstring_task,
)
from benchmarks.calibration.fine_tuned import Pretrained
from benchmarks.calibration.hyperparameters import Hyperparameters
from benchmarks.calibration.language_model import LanguageModelSettings, language_model_folder
from benchmarks.calibration.paper_tasks import PAPER_TASKS, read_paper_task
from benchmarks.calibration.pretrained_files import load_pretrained_model, load_tokenizer
from benchmarks.minilm import encoder_folder

ENCODER = Hyperparameters(
    model="all-MiniLM-L6-v2",
    target_modules=("query", "value"),
    batch_size=16,
    maximum_length=32,
    learning_rate=2e-3,
    steps=375,
    checkpoints=5,
    warmup_steps=20,
)
# Twice the texts need longer until a model is as sure of them.
ENCODERS = {"docstrings": ENCODER, "names": replace(ENCODER, steps=630)}
LANGUAGE_MODEL = replace(
    ENCODER,
    model="docstring language model",
    target_modules=("q_proj", "v_proj", "lm_head"),
    maximum_length=128,
    learning_rate=5e-3,
)
# Few examples with many classes, and more of them with two, as in the comparisons of links.
SIZES = {
    "docstrings": Sizes(train=300, test=500, shifted=200),
    "names": Sizes(train=1000, test=500, shifted=200),
    "choices": Sizes(train=500, test=500, shifted=200),
}
OVERRIDES = ("steps", "learning_rate", "batch_size", "maximum_length", "checkpoints")


def prepare(arguments: argparse.Namespace, seed: int, device: str) -> Pretrained:
    """Read a task, and find the model that is fine-tuned on it.

    Parameters
    ----------
    arguments : argparse.Namespace
        Options of the command line.
    seed : int
        Seed of the draw of an embedded task's texts.
    device : str
        Device to compute on.

    Returns
    -------
    pretrained : Pretrained
        Everything that fine-tuning needs.
    """
    pretrained = (_embedded if arguments.task in DOCSTRING_TASKS else _of_paper)(
        arguments, seed, device
    )
    overrides = {name: getattr(arguments, name) for name in OVERRIDES}
    given = {name: value for name, value in overrides.items() if value is not None}
    settings = replace(pretrained.hyperparameters, **given)
    return replace(
        pretrained,
        hyperparameters=replace(settings, warmup_steps=min(settings.warmup_steps, settings.steps)),
    )


def _embedded(arguments: argparse.Namespace, seed: int, device: str) -> Pretrained:
    name, show_progress = arguments.task, not arguments.quiet
    sizes = SIZES[name]
    sizes = replace(
        sizes,
        train=arguments.train_examples or sizes.train,
        test=arguments.test_examples or sizes.test,
        shifted=arguments.shifted_examples or sizes.shifted,
        files_per_library=arguments.files_per_library,
    )
    task = read_docstring_task(name, sizes, seed, show_progress)
    if task.is_prompt:
        settings = LanguageModelSettings(files_per_library=arguments.files_per_library)
        if arguments.language_model_steps is not None:
            settings = replace(settings, steps=arguments.language_model_steps)
        folder = language_model_folder(settings, arguments.cache, show_progress)
    else:
        folder = encoder_folder()
    return Pretrained(
        task=task,
        hyperparameters=LANGUAGE_MODEL if task.is_prompt else ENCODERS[name],
        tokenizer=load_tokenizer(folder, task),
        load=lambda: load_pretrained_model(folder, task, torch.float32, False, device),
        device=device,
        cache=arguments.cache,
        show_progress=show_progress,
    )


def _of_paper(arguments: argparse.Namespace, seed: int, device: str) -> Pretrained:
    task = read_paper_task(arguments.task, arguments.data, arguments.shifted)
    task = replace(
        task,
        train=task.train[: arguments.train_examples],
        test=task.test[: arguments.test_examples],
        shifted={
            name: examples[: arguments.shifted_examples] for name, examples in task.shifted.items()
        },
    )
    settings = PAPER_TASKS[task.name].hyperparameters
    model = arguments.model or settings.model
    return Pretrained(
        task=task,
        hyperparameters=replace(settings, model=str(model)),
        tokenizer=load_tokenizer(model, task),
        load=lambda: load_pretrained_model(
            model, task, getattr(torch, arguments.dtype), arguments.load_in_8bit, device
        ),
        device=device,
        cache=arguments.cache,
        show_progress=not arguments.quiet,
    )
