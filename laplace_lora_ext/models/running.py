"""How a model is run: as it stands, in whose turn, and what is put back."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not
from threading import Condition, get_ident
from typing import Any, ParamSpec, TypeVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


# PEFT's attribute of its layers, and of what wraps heads and embeddings.
_ACTIVE = "_active_adapter"

# Numbers of the largest buffer that is copied for a pass. Larger ones are masks and
# quantised weights, which nobody changes in place.
_LARGEST = 2**16

_COMPARED = 16  # numbers of each weight that every call looks at: a line of the cache
# What PEFT's layers are set to: lists and dictionaries that it changes in place.
_SETTINGS = ("merged_adapters", "_disable_adapters", "scaling")


# --- turns ----------------------------------------------------------------------------


class Turns:
    """Lets one thread at a time change models, or several run one that nobody changes.

    A thread that has its turn may take it again. Within it, tensors without a device
    are made on the CPU.
    """

    def __init__(self) -> None:
        self._left = Condition()  # whoever is alone holds its lock
        self._within: set[int] = set()  # threads that run one model together
        self._shared: object | None = None  # that model
        self._undoing = ExitStack()
        self._n_waiting = 0  # for a turn of their own: nobody joins others before them

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other thread is within, and keep them out."""
        with self._left, cpu_as_default():
            if get_ident() not in self._within:
                self._n_waiting += 1
                while self._within:
                    self._left.wait()
                self._n_waiting -= 1
            yield

    @contextmanager
    def together(
        self, model: object, prepare: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Run a model beside other threads that run it; the first prepares it for all.

        What that changed is undone when the last one leaves.
        """

        def may_enter() -> bool:
            is_same = self._shared is model and not self._n_waiting
            return is_same or not self._within

        with self._left:
            self._left.wait_for(may_enter)
            if not self._within:
                self._undoing.enter_context(prepare())
                self._shared = model
            self._within.add(get_ident())
        try:
            with cpu_as_default():
                yield
        finally:
            with self._left:
                self._within.remove(get_ident())
                self._left.notify_all()
                if not self._within:
                    self._shared = None
                    self._undoing.close()


# One for all models, since a model may hold another one.
TURNS = Turns()
alone = TURNS.alone


def exclusive(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a method run `alone`."""
    return alone()(method)


def normal_tensors(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a method make normal tensors, in a caller's inference mode too.

    No later graph can save an inference tensor, so none may be kept.
    """
    return torch.inference_mode(False)(method)


def cpu_as_default() -> AbstractContextManager[object]:
    """Make tensors without a device on the CPU, whatever `set_default_device` says."""
    if torch.get_default_device().type == "cpu":
        return nullcontext()  # a device's would slow every call of torch for nothing
    return torch.device("cpu")


def as_tensor(value: Any) -> Tensor:
    """Take a tensor where it is, and make one on the CPU of other numbers.

    Within `cpu_as_default`, `torch.as_tensor` would move tensors from an accelerator to
    the CPU.
    """
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def is_shared(model: nn.Module) -> bool:
    """Tell whether ranks share a model's weights, and must make the same passes."""
    return any(hasattr(weight, "full_tensor") for weight in model.parameters())


# --- modules --------------------------------------------------------------------------


class Tree:
    """All modules of a model, and where its parameters are.

    Attributes
    ----------
    model : nn.Module
    modules : list of nn.Module
        it and all within
    parameters : list of dict
        those of each module that has any, by name; PEFT and accelerate may replace
        what is in them
    adapted : list of nn.Module
        PEFT's layers and wrappers, which have an active adapter
    four_bit : list of nn.Module
        bitsandbytes' layers of four bits
    layers : list of nn.Module
        transformers' layers, which a training may checkpoint
    configs : list
        transformers' configurations that say whether a model keeps a cache
    read_by : list of nn.Module or None
        the layer that makes the logits, none where there is none; None before a pass
        has shown which it is
    watched : list of nn.Module
        those whose state a pass may change: all, before the first one
    leaves_state : bool
        whether passes of several threads have found what another one had left
    """

    read_by: list[nn.Module] | None = None
    leaves_state: bool = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.watched = self.modules = list(model.modules())
        self.parameters = [m._parameters for m in self.modules if m._parameters]
        self.adapted = [
            m
            for m in self.modules
            if isinstance(m, BaseTunerLayer) or _ACTIVE in vars(m)
        ]
        # Whatever has such layers has imported it.
        bitsandbytes = sys.modules.get("bitsandbytes")
        of_four_bits = () if bitsandbytes is None else bitsandbytes.nn.Linear4bit
        self.four_bit: list[Any] = [
            m for m in self.modules if isinstance(m, of_four_bits)
        ]
        self.layers: list[Any] = [
            m for m in self.modules if isinstance(m, GradientCheckpointingLayer)
        ]
        self._attributes = [vars(m) for m in self.modules]
        configs = [vars(m).get("config") for m in self.modules]
        with_cache = {id(c): c for c in configs if hasattr(c, "use_cache")}
        self.configs: list[Any] = list(with_cache.values())
        self._children: list[dict[str, Any]] = [
            m._modules for m in self.modules if m._modules
        ]
        self._before = self._now()
        # Whether `torch.compile` has put a module of its own around one.
        self.is_wrapped = any("_orig_mod" in m._modules for m in self.modules)
        # FSDP2 then replaces the parameters between passes.
        self.is_resharded = any(hasattr(type(m), "reshard") for m in self.modules)

    def current(self) -> Tree:
        """Return this list, or another one where modules were put in or replaced."""
        return self if self._now() == self._before else Tree(self.model)

    def _now(self) -> list[Any]:
        # FSDP2 puts a class of its own in the place of a module's.
        of_all = map(dict.values, self._children)
        return [type(self.model), *chain.from_iterable(of_all)]

    # Every call asks all modules, so in C: a loop would take as long as several
    # operations of the model.

    def in_training(self) -> list[nn.Module]:
        """List the modules that are in training mode."""
        flags = map(dict.get, self._attributes, repeat("training"))
        return list(compress(self.modules, flags))

    @property
    def is_compiled(self) -> bool:
        """Tell whether any module is, by a wrapper or by its own `compile()`."""
        compiled = map(dict.get, self._attributes, repeat("_compiled_call_impl"))
        return self.is_wrapped or any(compiled)

    @property
    def is_constant(self) -> bool:
        """Tell whether passes change nothing, so that several may run at once."""
        is_known = self.watched is not self.modules
        if not is_known or self.leaves_state or self.is_resharded:
            return False
        moves = any(map(attrgetter("is_meta"), self.weights()))
        return not (moves or self.is_compiled)

    def weights(self) -> Iterator[Tensor]:
        """Yield each parameter that is there now."""
        places = chain.from_iterable(map(dict.values, self.parameters))
        return filter(partial(is_not, None), places)


class Standing:
    """Tells at little cost that a model is still the one that was compared last.

    `check_same` compares by names, and takes Python as long as a small text takes the
    model. Here modules, settings of adapters, and addresses and versions of weights are
    compared, and the first numbers of each weight, since writes to `weight.data` change
    no version. The weights are given by the dictionaries that hold them, and their
    names there.
    """

    def __init__(
        self, tree: Tree, places: Iterable[tuple[dict[str, Any], str]]
    ) -> None:
        self._tree = tree
        layers = [m for m in tree.adapted if isinstance(m, BaseTunerLayer)]
        self._attributes = [vars(layer) for layer in layers]
        self._holders, self._names = zip(*places, strict=True)
        self._weights = self._present()
        # Those of inference mode count no versions.
        self._counting = [each for each in self._weights if not each.is_inference()]
        self._before = deepcopy(self._read())
        # The numbers of a device are read as one tensor.
        views: defaultdict[Any, list[Tensor]] = defaultdict(list)
        for weight in self._weights:
            views[weight.device, weight.dtype].append(_first_numbers(weight))
        self._views = list(views.values())
        self._numbers = list(map(torch.cat, self._views))

    def holds(self, tree: Tree) -> bool:
        """Tell whether nothing has changed; False where that is not known."""
        return (
            tree is self._tree
            and all(map(is_, self._present(), self._weights))
            and self._read() == self._before
            and all(map(torch.equal, map(torch.cat, self._views), self._numbers))
        )

    # Weights are many, and functions in C faster than loops.

    def _present(self) -> list[Any]:
        # None where one has gone, as where a parametrization computes it.
        return list(map(dict.get, self._holders, self._names))

    def _read(self) -> list[Any]:
        settings = [map(dict.get, self._attributes, repeat(n)) for n in _SETTINGS]
        addresses = map(Tensor.data_ptr, self._weights)
        versions = map(attrgetter("_version"), self._counting)
        return [*chain.from_iterable(settings), *addresses, *versions]


def _first_numbers(weight: Tensor) -> Tensor:
    """View a few numbers `(n,)` of a weight that lie beside each other in memory."""
    numbers = weight.detach()
    while numbers.ndim > 1:
        numbers = numbers.select(numbers.stride().index(max(numbers.stride())), 0)
    return numbers.reshape(-1)[:_COMPARED]  # of a single number, too


# --- evaluation -----------------------------------------------------------------------


@contextmanager
def evaluating(tree: Tree, adapter: str | None) -> Iterator[None]:
    """Evaluate a model eagerly, with one adapter alone; afterwards it is as before.

    What is right already is left alone, since modules may watch what is set on them.
    Unlike PEFT's `set_adapter`, this leaves `requires_grad` as it is.
    """
    others = [
        (module, vars(module)[_ACTIVE])
        for module in tree.adapted
        if adapter is not None
        and vars(module).get(_ACTIVE, adapter) not in (adapter, [adapter])
    ]
    training = set(tree.in_training())
    eagerly: AbstractContextManager[object] = nullcontext()
    if tree.is_compiled:
        # Compiled modules run their original code, with hooks that are called.
        eagerly = torch.compiler.set_stance("force_eager")
    try:
        for module, _ in others:
            # PEFT runs no trainable tokens of an adapter that has none.
            has_own = adapter in getattr(module, "trainable_tokens_delta", (adapter,))
            setattr(module, _ACTIVE, adapter if has_own else [])
        if training:
            tree.model.eval()
        keep_derivatives(tree)
        with eagerly:
            yield
    finally:
        for module, active in others:
            setattr(module, _ACTIVE, active)
        if training or tree.four_bit:
            for module in tree.modules:
                if module.training != (module in training):
                    module.training = not module.training


def keep_derivatives(tree: Tree) -> None:
    """Let gradients pass through bitsandbytes' four-bit layers in evaluation.

    On some CPUs (AVX-512 with bfloat16) such a layer packs its weights when it
    evaluates without gradients, for an operation that has no derivative: gradients of
    all that comes before the layer would be zero. Nothing but that packing depends on
    the layer's own mode.
    """
    for layer in tree.four_bit:
        layer.training = True
        if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            layer.state_dict()  # which unpacks


# --- state ----------------------------------------------------------------------------


@contextmanager
def put_back(tree: Tree) -> Iterator[State]:
    """Leave a model as it is before a pass, also after an error.

    RoPE of `rope_type="dynamic"` keeps the frequencies of a longer text, and some
    models count or average what they have seen. A model's state are the buffers of its
    modules, and attributes that are numbers, tensors or None, where a module has a
    buffer or a tensor after the first pass.
    """
    modules = tree.watched
    state = State(modules)
    try:
        with _without_cache(tree):
            yield state
        if modules is tree.modules:  # all: most have nothing that a pass could change
            tree.watched = list(filter(_has_tensors, modules))
    finally:
        for module, attributes, buffers in state.before:
            vars(module).update(_differing(module, attributes))
            module._buffers.update(buffers)


@contextmanager
def _without_cache(tree: Tree) -> Iterator[None]:
    """Let passes keep no keys and values: nothing is read twice.

    Layers that are computed anew would add to them.
    """
    before = [config.use_cache for config in tree.configs]
    for config in tree.configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config, use_cache in zip(tree.configs, before, strict=True):
            config.use_cache = use_cache


class State:
    """What modules have before passes, which are lent copies of their buffers."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.before = [(m, dict(vars(m)), dict(m._buffers)) for m in modules]
        for module, _, buffers in self.before:
            for name, buffer in buffers.items():
                if buffer is not None and buffer.numel() <= _LARGEST:
                    module._buffers[name] = buffer.clone()

    def watch(self) -> None:
        """Note all buffers as they are now, for `has_changed`."""
        self._watched = self._buffers_now()

    def _buffers_now(self) -> list[tuple[int, int]]:
        """Identify all buffers, with their versions."""
        return [
            (id(buffer), _version(buffer))
            for module, _, _ in self.before
            for buffer in module._buffers.values()
        ]

    def has_changed(self) -> bool:
        """Tell whether any module has other attributes now, or other buffers."""
        return self._watched != self._buffers_now() or any(
            _differing(module, attributes) for module, attributes, _ in self.before
        )


def _version(buffer: Tensor | None) -> int:
    """Count how often a buffer was changed in place."""
    # Those of inference mode don't tell.
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _differing(module: nn.Module, attributes: dict[str, Any]) -> dict[str, Any]:
    """Select the attributes that are a module's state, and other ones now."""
    now = vars(module)
    return {
        name: value
        for name, value in attributes.items()
        if value is not now.get(name) and _is_state(value) and _is_state(now.get(name))
    }


def _is_state(value: Any) -> bool:
    # Rather than a flag: layers of four bits, say, note that they have run.
    is_number = type(value) in (int, float)
    return value is None or is_number or isinstance(value, Tensor)


def _has_tensors(module: nn.Module) -> bool:
    return bool(module._buffers) or any(
        isinstance(value, Tensor) for value in vars(module).values()
    )


# --- checkpoints ----------------------------------------------------------------------


@contextmanager
def checkpointing(tree: Tree) -> Iterator[list[Any]]:
    """Checkpoint the layers of a model that its training checkpoints, and list them.

    They keep their inputs alone, and the rest is computed anew backwards. transformers
    does so in training mode alone, where dropout and whatever else a layer does in
    training would change the logits. Here the layers stay in evaluation mode, and the
    model's own choice of `use_reentrant` does not matter.
    """
    layers = [layer for layer in tree.layers if layer.gradient_checkpointing]
    # Others, such as accelerate, may have put a function of their own in its place.
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield layers
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward
