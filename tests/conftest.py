"""Settings of the test session, and fixtures of several folders."""

import gc

import pytest
import torch
from peft import PeftModel

import laplace_lora_ext  # noqa: F401 - registers the classes that laplace.Laplace is asked for
from tests.support.models import Batch, first_batch, lora_model, plain_model
from tests.support.posteriors import OURS_AND_A_HOSTS, fitted, make

# The models are so small that a second thread only waits for the first.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Leave what imports have made out of garbage collections, which are many."""
    gc.freeze()


@pytest.fixture
def la():
    """A posterior of a classifier, fitted to `ragged_batches()`."""
    return fitted()


@pytest.fixture(params=OURS_AND_A_HOSTS)
def unfitted(request: pytest.FixtureRequest):
    """An unfitted posterior of a plain module for `pairs`, of two structures."""
    return make(plain_model(), request.param)


@pytest.fixture
def batch() -> Batch:
    """The first of the batches that posteriors are fitted to."""
    return first_batch()


@pytest.fixture
def eight_texts() -> Batch:
    """All texts of `ragged_batches` in one batch, padded to seven tokens."""
    return first_batch(batch_size=8)


@pytest.fixture
def bert() -> PeftModel:
    return lora_model("bert").eval()


@pytest.fixture
def gpt2() -> PeftModel:
    return lora_model("gpt2").eval()
