"""The list of tasks; those that read the same texts share a file."""

from benchmarks.tasks import (
    code,
    docstrings,
    multiple_choice,
    names,
    numpydoc,
    paper,
    sentences,
)

# The experiments' settings were chosen on these. `choices`, ARC-Easy and CLINC150's
# domains had been kept for the end too, until they were looked at.
CHOSEN_ON = (
    docstrings.DOCSTRINGS,
    names.NAMES,
    names.CHOICES,
    docstrings.SUBMODULES,
    code.EXCEPTIONS,
    numpydoc.TYPE_OF,
    numpydoc.BELONGS,
    *sentences.DOMAINS,
    *multiple_choice.ARC_EASY_TASKS,
    *sentences.CHOOSING_SENTENCES,
)
# No setting was chosen on these, so that they tell how the settings carry over.
KEPT = (
    numpydoc.SECTION_OF,
    docstrings.VERBS_LEFT_OUT,
    code.COMMENTS,
    numpydoc.DEFAULTS,
    *sentences.MANY,
    *multiple_choice.KEPT_CHOICES,
    *sentences.KEPT_SENTENCES,
)
TASKS = {task.name: task for task in (*CHOSEN_ON, *KEPT)} | paper.PAPER_TASKS
