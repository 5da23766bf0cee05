"""What models were trained to predict: one file for each task, found by its name."""

from __future__ import annotations

from laplace_lora_ext.messages import check_name
from laplace_lora_ext.tasks.classification import CLASSIFICATION
from laplace_lora_ext.tasks.language import LANGUAGE_MODELING
from laplace_lora_ext.tasks.multi_label import MULTI_LABEL
from laplace_lora_ext.tasks.preferences import PREFERENCES
from laplace_lora_ext.tasks.regression import REGRESSION
from laplace_lora_ext.tasks.task import Task
from laplace_lora_ext.tasks.token_labels import TOKEN_CLASSIFICATION

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        CLASSIFICATION,
        REGRESSION,
        PREFERENCES,
        MULTI_LABEL,
        TOKEN_CLASSIFICATION,
        LANGUAGE_MODELING,
    )
}
"""Tasks by the names of their likelihoods."""

LIKELIHOOD_OF = {
    "single_label_classification": CLASSIFICATION.name,
    "multi_label_classification": MULTI_LABEL.name,
    "regression": REGRESSION.name,
}
"""Likelihoods by what transformers calls the `problem_type`."""


def task_of(likelihood: str) -> Task:
    """Find a task by the name of its likelihood, or refuse the name."""
    check_name("likelihood", likelihood, TASKS)
    return TASKS[likelihood]
