"""The list of tasks; tasks that read the same texts share a file, and so do the paper's."""

from benchmarks.tasks import code, docstrings, names, numpydoc, paper

# Settings are chosen on these. The last three were kept for the end until they were looked at.
FIRST = (docstrings.DOCSTRINGS, names.NAMES, names.CHOICES, docstrings.SUBMODULES)
CHOSEN_ON = (*FIRST, code.EXCEPTIONS, numpydoc.TYPE_OF, numpydoc.BELONGS)
KEPT = (numpydoc.SECTION_OF, docstrings.VERBS_LEFT_OUT, code.COMMENTS, numpydoc.DEFAULTS)
TASKS = {task.name: task for task in (*CHOSEN_ON, *KEPT)} | paper.PAPER_TASKS
