"""A model's modules, listed once: a walk through them takes as long as a small text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

ACTIVE = "_active_adapter"
"""PEFT's attribute of its layers, and of what wraps heads and embeddings."""


class Tree:
    """All modules of a model, and where its parameters are.

    Attributes
    ----------
    modules : list of nn.Module
    parameters : list of dict
        those of each module that has any, by name; PEFT and accelerate may replace
        what is in them
    adapted : list of nn.Module
        PEFT's layers and wrappers, which have an active adapter
    checkpointable : list of nn.Module
        layers that transformers may compute anew for a backward pass
    read_by : list of nn.Module or None
        the layer that makes the logits, none where there is none; None before a pass
        has shown which it is
    changing : list of nn.Module or None
        modules whose state passes may change; None before the first pass
    leaves_state : bool
        whether any pass has changed what a later one would read
    """

    read_by: list[nn.Module] | None = None
    changing: list[nn.Module] | None = None
    leaves_state: bool = False

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.modules = list(model.modules())
        self.parameters = [m._parameters for m in self.modules if m._parameters]
        self.adapted = [
            m
            for m in self.modules
            if isinstance(m, BaseTunerLayer) or ACTIVE in vars(m)
        ]
        self.checkpointable: list[Any] = [
            m for m in self.modules if isinstance(m, GradientCheckpointingLayer)
        ]
        self._children: list[Mapping[str, nn.Module | None]] = [
            m._modules for m in self.modules if m._modules
        ]
        self._identities = self._read()
        # Whether `torch.compile` has put a module of its own around one.
        self.is_wrapped = any("_orig_mod" in m._modules for m in self.modules)
        # FSDP2 then replaces the parameters between passes.
        self.is_resharded = any(hasattr(type(m), "reshard") for m in self.modules)

    def current(self) -> Tree:
        """Return this list, or another one where modules were put in or replaced."""
        return self if self._read() == self._identities else Tree(self._model)

    def _read(self) -> list[int]:
        # FSDP2 puts a class of its own in the place of a module's.
        ids = [id(m) for children in self._children for m in children.values()]
        return [id(type(self._model)), *ids]

    @property
    def is_compiled(self) -> bool:
        """Tell whether a module holds compiled code, which calls no LoRA layers."""
        # `module.compile()` needs no wrapper.
        return self.is_wrapped or any(m._compiled_call_impl for m in self.unready())

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules with their names."""
        return self._model.named_modules()

    @property
    def watched(self) -> list[nn.Module]:
        """List the modules that a pass may change: all, before the first one."""
        return self.modules if self.changing is None else self.changing

    @property
    def is_constant(self) -> bool:
        """Tell whether passes change nothing, so that several may run at once."""
        is_known = self.changing is not None and not self.leaves_state
        moves = self.is_resharded or any(p.is_meta for *_, p in self.all_parameters())
        return is_known and not moves and not self.is_compiled

    def unready(self) -> list[nn.Module]:
        """List the modules that are in training mode or compiled, in most calls none.

        Each walk through all modules takes as long as an operation of the model.
        """
        return [m for m in self.modules if m.training or m._compiled_call_impl]

    def training(self) -> list[nn.Module]:
        """List the modules that are in training mode."""
        return [m for m in self.unready() if m.training]

    def all_parameters(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """Yield each parameter that is there now, with its place."""
        for holder in self.parameters:
            for name, parameter in holder.items():
                if parameter is not None:
                    yield holder, name, parameter

    def adapter_layers(self) -> list[BaseTunerLayer]:
        """List PEFT's layers."""
        return [m for m in self.adapted if isinstance(m, BaseTunerLayer)]
