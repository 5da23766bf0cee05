"""A lab: tasks, methods, and experiments over them: `python -m benchmarks`."""

import warnings

# Deprecations inside other packages tell a reader of results nothing.
warnings.filterwarnings(
    "ignore", category=FutureWarning, module=r"(torch|transformers)\b"
)
