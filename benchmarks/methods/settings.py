"""Settings of rivals that train again, for `python -m benchmarks settings` to try."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.utils.data import DataLoader

from benchmarks.methods.method import Members
from benchmarks.methods.sampled import BLoB, IVONLoRA, retrained
from benchmarks.methods.swag import SWAG, of_iterates
from benchmarks.methods.trained_again import MonteCLoRA, alone
from benchmarks.models import AdaptedModel
from benchmarks.training import Recipe


@dataclass(frozen=True)
class Tried:
    """How a rival is fitted, and the recipes to compare."""

    fit: Callable[[Recipe, AdaptedModel, DataLoader], Members]
    recipes: tuple[Recipe, ...]


IVON = Tried(
    retrained,
    (
        IVONLoRA(learning_rate=0.03),  # the paper's
        IVONLoRA(learning_rate=0.5),
        IVONLoRA(learning_rate=2.0),
        IVONLoRA(learning_rate=2.0, effective_size=1e6, first_hessian=1e-3),
        IVONLoRA(learning_rate=5.0),
    ),
)
BLOB = Tried(
    retrained,
    (
        BLoB(),
        BLoB(start=0.2),
        BLoB(divergence_rate=0.02),
    ),
)
OF_SWAG = Tried(
    of_iterates,
    (
        SWAG(),
        SWAG(tail=0.25),
        SWAG(rate=0.5, tail=0.25),
    ),
)
MONTECLORA = Tried(
    alone,
    (
        MonteCLoRA(scale=1e-4, divergence=1e-5),  # PEFT's
        MonteCLoRA(scale=3e-3, divergence=1e-5),
        MonteCLoRA(),
    ),
)
# By the method's key.
SETTINGS = {"ivon": IVON, "blob": BLOB, "swag": OF_SWAG, "monteclora": MONTECLORA}
