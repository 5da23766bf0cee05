"""The list of tasks; the paper's share a file, and so do two that read the same sections."""

from benchmarks.tasks import (
    choices,
    comments,
    defaults,
    docstrings,
    exceptions,
    names,
    paper,
    parameters,
    sections,
    submodules,
    verbs,
)

# Settings are chosen on these. The last three were kept for the end until they were looked at.
FIRST = (docstrings.TASK, names.TASK, choices.TASK, submodules.TASK)
CHOSEN_ON = (*FIRST, exceptions.TASK, *parameters.TASKS)
KEPT = (sections.TASK, verbs.TASK, comments.TASK, defaults.TASK)
TASKS = {task.name: task for task in (*CHOSEN_ON, *KEPT, *paper.TASKS)}
