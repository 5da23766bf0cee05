"""Settings of the test session, and fixtures of several folders."""

import pytest
import torch

import laplace_lora_ext  # noqa: F401 - registers the classes that laplace.Laplace is asked for
from tests.support.models import plain_model
from tests.support.posteriors import STRUCTURES, make

# The models are so small that a second thread only waits for the first.
torch.set_num_threads(1)


@pytest.fixture(params=STRUCTURES)
def la(request: pytest.FixtureRequest):
    """A posterior of each structure, not fitted yet, of a plain module for `pairs`."""
    return make(plain_model(), request.param)
