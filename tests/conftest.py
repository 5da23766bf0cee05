"""Settings of the test session."""

import torch

import laplace_lora_ext  # noqa: F401 - registers the classes that laplace.Laplace is asked for

# The models are so small that a second thread only waits for the first.
torch.set_num_threads(1)
