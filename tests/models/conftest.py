"""Models and texts that many tests of models take."""

import pytest
from torch import Tensor, nn

from tests.support.models import OfBatches, llama, ragged_batches


@pytest.fixture
def eight_texts() -> dict[str, Tensor]:
    """All texts of `ragged_batches` in one batch, padded to seven tokens."""
    (batch,) = ragged_batches(batch_size=8)
    return batch


@pytest.fixture(params=["bare", "wrapped"])
def trimmed(request: pytest.FixtureRequest) -> nn.Module:
    """A language model whose output layer knows the first 40 tokens alone."""
    model = llama().eval()
    weight = model.lm_head.weight.detach()
    # Its configuration still speaks of all of them.
    trimmed = nn.Linear(16, 40, bias=False)
    trimmed.weight.data.copy_(weight[:40])
    model.lm_head = trimmed
    if request.param == "wrapped":
        return OfBatches(model)
    return model
