"""Everything of a model and of torch that a user could see changed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Asked of torch, since later versions may have more kinds.
ATTRIBUTES = vars(nn.Module())
HOOKS = [name for name in ATTRIBUTES if name.endswith("_hooks")]


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
        value = parameter.detach().clone()
        value_of_grad = None
        if grad is not None:
            value_of_grad = grad.clone()
        return Parameter(
            parameter=parameter,
            value=value,
            requires_grad=parameter.requires_grad,
            grad=grad,
            value_of_grad=value_of_grad,
        )

    def assert_equal(
        self,
        now: "Parameter",
        name: str,
    ) -> None:
        """Compare with what the parameter of this name holds now."""
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
        self.parameters = _of_each(parameters, Parameter.of)
        self.buffers = _of_each(buffers, torch.clone)
        self.training = _of_each(modules, _is_training)
        self.attributes = _of_each(modules, _attributes_of)
        self.hooks = _of_each(modules, _hooks_of)
        self.config = _config_of(model)
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
            value_now = now.buffers[name]
            assert torch.equal(value_now, value), name
        if random_state:
            state = now.random_state
            assert torch.equal(state, self.random_state)


def _of_each(
    named: Mapping[str, Any],
    read: Callable[[Any], Any],
) -> dict[str, Any]:
    return {name: read(value) for name, value in named.items()}


def _config_of(model: Any) -> dict[str, Any] | None:
    # Plain modules have none.
    if not hasattr(model, "config"):
        return None
    return model.config.to_dict()


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
    product = one.matmul(one)
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        # What autocast would do, without asking it for each kind of device.
        "autocast": product.dtype,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def facts_of(
    la: Any,
    batch: Any,
) -> dict[str, Tensor]:
    """Tell what a fit comes to: sums, evidence and predictions of a batch."""
    moments = la.predictive_moments(batch)
    evidence = la.log_marginal_likelihood()
    curvature = la.H
    if not isinstance(curvature, Tensor):
        curvature = curvature.to_matrix()
    return {
        "curvature": curvature,
        "evidence": evidence.detach(),
        # Copies, which a later fit doesn't change.
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
    model.train()
    modules = list(model.modules())
    parameters = list(model.parameters())
    # Every few modules and parameters, so that no rule for all restores them.
    for module in modules[1::3]:
        module.training = False
    for module in modules:
        if type(module) is nn.Linear:
            module.register_forward_hook(_changing_nothing)
            module.register_forward_pre_hook(_changing_nothing)
    for parameter in parameters[1::2]:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.grad = noise.to(parameter)
    for parameter in parameters[::5]:
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
    left_out = (nn.Module, nn.Parameter, str)
    if isinstance(value, left_out):
        return []
    # What refers to itself would otherwise be followed without end.
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    for part in _parts_of(value):
        tensors += tensors_of(part, seen)
    return tensors


def _parts_of(value: Any) -> list[Any]:
    """Take what a value holds: its items, or else its attributes."""
    if isinstance(value, (list, tuple, set)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    # Numbers have none.
    attributes = getattr(value, "__dict__", {})
    return list(attributes.values())
