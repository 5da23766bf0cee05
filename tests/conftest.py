"""Settings of the test session."""

import torch

# The models are so small that a second thread only waits for the first.
torch.set_num_threads(1)
