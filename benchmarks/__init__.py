"""Measurements on a real fine-tuned model: run ``python -m benchmarks``."""

import warnings

# Deprecations inside other packages say nothing to somebody who reads a table of results.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|transformers)\b")
