"""The numbers that a posterior is made with."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from laplace_lora_ext.models.locks import as_tensor


class Positive:
    """An attribute of a posterior that must be positive and finite.

    Other numbers make no Gaussian of a curvature. What is no number at all, the host refuses where
    it has such a property.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, la: Any, cls: type | None = None) -> Any:
        return self if la is None else getattr(la, f"_{self._name}")

    def __set__(self, la: Any, value: Any) -> None:
        if isinstance(value, Real | torch.Tensor):
            numbers = as_tensor(value).detach()
            if not bool((torch.isfinite(numbers) & (numbers > 0)).all()):
                raise ValueError(
                    f"{self._name} must be positive and finite, not {numbers.tolist()}."
                )
        host = getattr(super(self._owner, type(la)), self._name, None)
        if isinstance(host, property):
            host.__set__(la, value)
        else:
            setattr(la, f"_{self._name}", _one_number(self._name, value))
        la._posterior_scale = None  # that the host has made with the old value


def _one_number(name: str, value: Any) -> float | torch.Tensor:
    """A number that can be saved, or a tensor without dimensions, which may have a graph."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.reshape(())
    if isinstance(value, Real):
        return float(value)
    raise ValueError(f"{name} must be one number, not {value!r}.")
