"""Methods to choose the prior precision, one file and one object each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laplace_lora_ext.messages import check_name
from laplace_lora_ext.tasks.task import Task
from laplace_lora_ext.tuning.agreement import Agreement
from laplace_lora_ext.tuning.descents import Marglik, ValGD
from laplace_lora_ext.tuning.gridsearch import GridSearch, TokenGridSearch
from laplace_lora_ext.tuning.method import TuningMethod
from laplace_lora_ext.tuning.second_training import SecondTraining

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


def build(
    method: str | TuningMethod, options: Mapping[str, Any], task: Task
) -> TuningMethod:
    """Build a task's method by its name; an object stays itself."""
    if isinstance(method, TuningMethod):
        if options:
            raise ValueError(
                f"Pass {', '.join(options)} to {type(method).__name__} itself."
            )
        return method
    methods = METHODS_OF_TEXTS if task.writes else METHODS
    check_name("method", method, methods)
    if method == "marglik":  # callers of the host name a link, which predicts nothing
        options = {name: options[name] for name in options if name != "link_approx"}
    return methods[method](**options)
