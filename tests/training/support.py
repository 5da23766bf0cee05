"""What tests of trainers of several labels, and of labels of tokens, have in common."""

from typing import Any

import torch
from transformers import Trainer

from laplace_lora_ext import LaplaceCallback
from tests.support.trainers import N, values


def trained_with_callback(
    trainer: Trainer,
    method: str,
) -> Any:
    """Train with a callback that tunes by a method; return its posterior."""
    callback = LaplaceCallback(method=method, trainer=trainer)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.la is not None
    return callback.la


def entry_with(
    figure: str,
    trainer: Trainer,
) -> dict[str, float]:
    """Find the one entry of a trainer's log that has a figure."""
    entries = []
    for entry in trainer.state.log_history:
        if figure in entry:
            entries.append(entry)
    (found,) = entries
    return found


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
