"""Methods to choose the prior precision, one file and one object each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from laplace_lora_ext.tasks.task import Task
from laplace_lora_ext.tuning.agreement import Agreement
from laplace_lora_ext.tuning.gridsearch import GridSearch
from laplace_lora_ext.tuning.marglik import Marglik
from laplace_lora_ext.tuning.method import TuningMethod
from laplace_lora_ext.tuning.second_training import SecondTraining
from laplace_lora_ext.tuning.token_gridsearch import TokenGridSearch
from laplace_lora_ext.tuning.val_gd import ValGD

METHODS: dict[str, type[TuningMethod]] = {
    "agreement": Agreement,
    "marglik": Marglik,
    "gridsearch": GridSearch,
    "val_gd": ValGD,
    "second_training": SecondTraining,
}

METHODS_OF_TEXTS: dict[str, type[TuningMethod]] = {
    "gridsearch": TokenGridSearch,
    "marglik": Marglik,
}
"""Methods for free text, whose logits have no moments."""

PREDICTIONS = {"link_approx", "n_samples"}
"""How predictions are made: "marglik" needs none, and ignores these options as the host
does."""


def methods_of(task: Task) -> Mapping[str, type[TuningMethod]]:
    """Return a task's methods, by their names."""
    return METHODS_OF_TEXTS if task.writes else METHODS


def build(
    method: str | TuningMethod,
    options: Mapping[str, Any],
    methods: Mapping[str, type[TuningMethod]] = METHODS,
) -> TuningMethod:
    """Build a method by its key in `methods`; an object stays itself.

    Unknown methods and options, and missing ones, are refused by a `ValueError`.
    """
    if isinstance(method, TuningMethod):
        if options:
            raise ValueError(
                f"Pass {', '.join(options)} to {type(method).__name__} itself."
            )
        return method
    needed = required_data(method, methods)
    cls = methods[method]
    if method == "marglik":
        options = {
            name: value for name, value in options.items() if name not in PREDICTIONS
        }
    known = [field.name for field in fields(cls)]
    for name in options:
        if name not in known:
            raise ValueError(
                f"{cls.__name__} has no option {name!r}: it has {', '.join(known)}."
            )
    for name in needed:
        if name not in options:
            raise ValueError(f'method="{method}" needs {name}.')
    return cls(**options)


def required_data(
    method: str, methods: Mapping[str, type[TuningMethod]] = METHODS
) -> list[str]:
    """List the options without which a method does nothing, such as "train_loader"."""
    if not isinstance(method, str) or method not in methods:
        # Other objects may hold data, which nobody wants printed.
        name = repr(method) if isinstance(method, str) else type(method).__name__
        raise ValueError(f"method {name} is none of {list(methods)}.")
    return [field.name for field in fields(methods[method]) if field.default is MISSING]
