"""What each method of choosing a prior precision needs, and what it has no use for."""

from __future__ import annotations

import warnings
from typing import Any

LINEARIZED = ("linearized_marglik", "linearized_loo")
_BY_VALIDATION = ("gridsearch", "val_gd")
_METHODS = ("marglik", *LINEARIZED, *_BY_VALIDATION)


def check_arguments(
    likelihood: str,
    pred_type: str,
    method: str,
    val_loader: Any,
    train_loader: Any,
    loss: Any,
    optimize_sigma_noise: bool,
) -> None:
    """Refuse what the method has no use for."""
    if method not in _METHODS:
        raise ValueError(f"method {method!r} is none of {list(_METHODS)}.")
    if method in _BY_VALIDATION and val_loader is None:
        raise ValueError(f'method="{method}" needs validation data: pass val_loader.')
    if method in LINEARIZED and train_loader is None:
        raise ValueError(f'method="{method}" needs the training data: pass train_loader.')
    if method not in _BY_VALIDATION and val_loader is not None:
        warnings.warn(f'val_loader plays no part in method="{method}".', stacklevel=3)
    if method not in LINEARIZED and train_loader is not None:
        warnings.warn(f'train_loader plays no part in method="{method}".', stacklevel=3)
    if method in ("val_gd", "linearized_loo") and (pred_type != "glm" or loss is not None):
        raise ValueError(f'method="{method}" minimises the negative log-likelihood of "glm" alone.')
    if optimize_sigma_noise and (method != "marglik" or likelihood != "regression"):
        raise ValueError('optimize_sigma_noise is for regression with method="marglik".')
