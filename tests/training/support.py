"""What tests of trainers of several labels, and of labels of tokens, have in common."""

from typing import Any

import torch
from transformers import Trainer

from tests.support.trainers import N, values


def second_member(
    la: Any,
    trainer: Trainer,
) -> Any:
    """Train a second time, which leaves the model's weights; return the new member."""
    before = values(trainer.model)
    history = la.optimize_prior_precision(
        method="second_training",
        trainer=trainer,
    )
    after = trainer.model.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    (other,) = history.posteriors
    # A fifth is held out.
    assert other.n_data == 0.8 * N
    return other
