"""Everything of a model and of torch that a user could see changed."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.dense import curvature_of
from tests.support.models import generator

# Asked of torch, since later versions may have more kinds.
HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]


class Snapshot:
    """All of a model and of torch's global state that a user could see changed."""

    def __init__(self, model: Any) -> None:
        modules, one = dict(model.named_modules()), torch.ones(1, 1)
        self.parameters = dict(model.named_parameters())
        # The same objects: an optimizer holds on to those that it was given.
        self.grads = {name: each.grad for name, each in self.parameters.items()}
        tensors = self.parameters | dict(model.named_buffers())
        self.values = {name: each.detach().clone() for name, each in tensors.items()}
        self.values |= {
            f"gradient of {name}": grad.clone()
            for name, grad in self.grads.items()
            if grad is not None
        }
        self.settings = {
            # What autocast would do, without asking it for each kind of device.
            "torch": (torch.is_grad_enabled(), (one @ one).dtype),
            # Plain modules have none.
            "config": model.config.to_dict() if hasattr(model, "config") else None,
            "training": {name: each.training for name, each in modules.items()},
            "attributes": {name: set(vars(each)) for name, each in modules.items()},
            # A kind of which none was ever registered may be None.
            "hooks": {
                (name, kind): dict(getattr(each, kind) or {})
                for name, each in modules.items()
                for kind in HOOKS
            },
            "flags": {name: p.requires_grad for name, p in self.parameters.items()},
        }
        self.random_state = torch.get_rng_state()

    def assert_equal(self, model: nn.Module, random_state: bool = True) -> None:
        """Compare with what there is now; draws may have moved the random state."""
        now = Snapshot(model)
        for name, setting in self.settings.items():
            assert now.settings[name] == setting, name
        assert list(now.parameters) == list(self.parameters)
        for name, parameter in self.parameters.items():
            assert now.parameters[name] is parameter, name
            assert now.grads[name] is self.grads[name], name
        assert now.values.keys() == self.values.keys()
        for name, value in self.values.items():
            assert torch.equal(now.values[name], value), name
        if random_state:
            assert torch.equal(now.random_state, self.random_state)


def facts_of(la: Any, batch: Any) -> dict[str, Tensor]:
    """Tell what a fit comes to: sums, evidence and predictions of a batch."""
    moments = la.predictive_moments(batch)
    return {
        "curvature": curvature_of(la),
        "evidence": la.log_marginal_likelihood().detach(),
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
    draws = generator(3)
    model.train()
    modules = list(model.modules())
    parameters = list(model.parameters())
    # Every few modules and parameters, so that no rule for all restores them.
    for module in modules[1::3]:
        module.training = False
    for module in modules:
        if type(module) is nn.Linear:
            # Hooks that return nothing, as a user's may that only look.
            module.register_forward_hook(lambda *_: None)
            module.register_forward_pre_hook(lambda *_: None)
    for parameter in parameters[1::2]:
        noise = torch.randn(parameter.shape, generator=draws)
        parameter.grad = noise.to(parameter)
    for parameter in parameters[::5]:
        parameter.requires_grad_(not parameter.requires_grad)
    return model


def tensors_of(value: Any, seen: set[int]) -> list[Tensor]:
    """Find tensors that can be reached from a value, those of modules left out."""
    # What refers to itself would otherwise be followed without end.
    if isinstance(value, nn.Module | nn.Parameter | str) or id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list | tuple | set):
        parts = value
    else:
        # Numbers have none.
        parts = getattr(value, "__dict__", {}).values()
    return [tensor for part in list(parts) for tensor in tensors_of(part, seen)]
