"""A lab: tasks, methods, one fine-tuning, and experiments over them: `python -m benchmarks`."""

import warnings

# Deprecations inside other packages say nothing to somebody who reads a table of results.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|transformers)\b")
