"""The list of tasks, one file each; those of the paper share one."""

from benchmarks.tasks import choices, docstrings, names, paper

TASKS = {task.name: task for task in (docstrings.TASK, names.TASK, choices.TASK, *paper.TASKS)}
