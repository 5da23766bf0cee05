"""A fifth of the training texts, held out to choose what training texts can't tell."""

from typing import NamedTuple

from benchmarks.fine_tuning import TRAIN, Pretrained
from benchmarks.methods.method import labels_of
from benchmarks.training import Records
from laplace_lora_ext.processes.shards import divide

# The same for every method, ours and rivals, that wants labels to choose by.
HELD_OUT = 0.2
HELD = "held-out texts"  # the name of their data set


class Split(NamedTuple):
    """Training texts: those that are trained on, and those that are held out."""

    rest: Records
    held: Records


def held_out(pretrained: Pretrained) -> Split:
    """Hold out a fifth of each class, so that none is missing where there are few."""
    records = pretrained.data[TRAIN]
    batches = pretrained.loader(records)
    division = divide(batches, HELD_OUT, labels_of(records))
    return Split(list(division.rest), list(division.held))
