"""Everything of a model and of torch that a user could see changed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Asked of torch, since later versions may have more kinds.
HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]


@dataclass(frozen=True)
class Parameter:
    """A parameter, and copies of its value and gradient."""

    parameter: nn.Parameter
    value: Tensor
    requires_grad: bool
    grad: Tensor | None
    value_of_grad: Tensor | None

    @staticmethod
    def of(parameter: nn.Parameter) -> "Parameter":
        """Copy what a parameter holds now."""
        grad = parameter.grad
        return Parameter(
            parameter=parameter,
            value=parameter.detach().clone(),
            requires_grad=parameter.requires_grad,
            grad=grad,
            value_of_grad=None if grad is None else grad.clone(),
        )

    def assert_equal(self, now: "Parameter", name: str) -> None:
        # The same object: an optimizer holds on to the one that it was given.
        assert now.parameter is self.parameter, name
        assert torch.equal(now.value, self.value), name
        assert now.requires_grad == self.requires_grad, name
        assert now.grad is self.grad, name
        if self.grad is not None:
            assert torch.equal(now.grad, self.value_of_grad), name


class Snapshot:
    """All of a model and of torch's global state that a user could see changed."""

    def __init__(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        modules = dict(model.named_modules())
        has_config = hasattr(model, "config")
        self.parameters = _of_each(parameters, Parameter.of)
        self.buffers = _of_each(buffers, torch.clone)
        self.training = _of_each(modules, _is_training)
        self.attributes = _of_each(modules, _attributes_of)
        self.hooks = _of_each(modules, _hooks_of)
        self.config = model.config.to_dict() if has_config else None
        self.torch = _torch_state()
        self.random_state = torch.get_rng_state()

    def assert_equal(
        self,
        model: nn.Module,
        random_state: bool = True,
    ) -> None:
        """Compare with what there is now; draws may have moved the random state."""
        now = Snapshot(model)
        assert now.torch == self.torch
        assert now.training == self.training
        assert now.attributes == self.attributes
        assert now.hooks == self.hooks
        assert now.config == self.config
        assert list(now.parameters) == list(self.parameters)
        for name, parameter in self.parameters.items():
            parameter.assert_equal(now.parameters[name], name)
        for name, value in self.buffers.items():
            assert torch.equal(now.buffers[name], value), name
        if random_state:
            assert torch.equal(now.random_state, self.random_state)


def _of_each(
    named: Mapping[str, Any],
    read: Callable[[Any], Any],
) -> dict[str, Any]:
    return {name: read(value) for name, value in named.items()}


def _is_training(module: nn.Module) -> bool:
    return module.training


def _attributes_of(module: nn.Module) -> set[str]:
    return set(vars(module))


def _hooks_of(module: nn.Module) -> dict[str, dict]:
    hooks: dict[str, dict] = {}
    for kind in HOOKS:
        # A kind of which none was ever registered may be None.
        of_kind = getattr(module, kind) or {}
        hooks[kind] = dict(of_kind)
    return hooks


def _torch_state() -> dict[str, Any]:
    """Tell what torch is set to, for all models."""
    one = torch.ones(1, 1)
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        # What autocast would do, without asking it for each kind of device.
        "autocast": one.matmul(one).dtype,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def facts_of(
    la: Any,
    batch: Any,
) -> dict[str, Tensor]:
    """Tell what a fit comes to: sums, evidence and predictions of a batch."""
    moments = la.predictive_moments(batch)
    is_tensor = isinstance(la.H, Tensor)
    return {
        "curvature": la.H if is_tensor else la.H.to_matrix(),
        "evidence": la.log_marginal_likelihood().detach(),
        "loss": la.loss.clone(),
        "weights": la.mean.clone(),
        "examples": torch.tensor(la.n_data),
        "means": moments.f_mu.detach(),
        "covariances": moments.f_var.detach(),
        "prediction": la(batch),
    }


def half_trained(model: nn.Module) -> nn.Module:
    """Leave a model unlike any default: modes, gradients, flags, hooks."""
    generator = torch.Generator().manual_seed(3)
    # Every few modules and parameters, so that no rule for all restores them.
    model.train()
    for index, module in enumerate(model.modules()):
        if index % 3 == 1:
            module.training = False
        if type(module) is nn.Linear:
            module.register_forward_hook(_changing_nothing)
            module.register_forward_pre_hook(_changing_nothing)
    for index, parameter in enumerate(model.parameters()):
        if index % 2 == 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = noise.to(parameter)
        if index % 5 == 0:
            was_trained = parameter.requires_grad
            parameter.requires_grad_(not was_trained)
    return model


def _changing_nothing(*args: Any) -> None:
    """Return nothing, as a user's hook may that only looks."""


def tensors_of(
    value: Any,
    seen: set[int],
) -> list[Tensor]:
    """Find tensors that can be reached from a value, those of modules left out."""
    if isinstance(value, (nn.Module, nn.Parameter, str)):
        return []
    # What refers to itself would otherwise be followed without end.
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    tensors: list[Tensor] = []
    for part in parts:
        tensors += tensors_of(part, seen)
    return tensors
