"""The list of tasks, one file each or two that read the same; those of the paper share one."""

from benchmarks.tasks import choices, docstrings, exceptions, names, paper, parameters, submodules

# The method's settings were chosen on the first four; the others were kept for the end.
EMBEDDED = (docstrings.TASK, names.TASK, choices.TASK, submodules.TASK)
KEPT = (exceptions.TASK, *parameters.TASKS)
TASKS = {task.name: task for task in (*EMBEDDED, *KEPT, *paper.TASKS)}
