"""Models and texts that many tests of models take."""

import pytest
from torch import Tensor

from tests.support.models import ragged_batches


@pytest.fixture
def eight_texts() -> dict[str, Tensor]:
    """All texts of `ragged_batches` in one batch, padded to seven tokens."""
    (batch,) = ragged_batches(batch_size=8)
    return batch
