"""Data to tune on."""

import pytest

from tests.support.models import ragged_batches


@pytest.fixture
def validation():
    return ragged_batches(seed=7)
