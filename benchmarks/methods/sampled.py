"""Rivals that predict with sampled weights: TFB, BLoB and IVON-LoRA."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from benchmarks.methods.method import LogitsOf, Members, as_it_is
from benchmarks.models import AdaptedModel
from benchmarks.training import Hyperparameters, Recipe, Weights

SAMPLES = 10
DEVIATION = ".deviation"  # after a weight's name: its standard deviation

Noise = Callable[[torch.Generator], Weights]


def sampled(model: AdaptedModel, noise: Noise, draws: int = SAMPLES) -> Members:
    """The model with noise on its weights, drawn as many times as for the papers' tables."""

    def drawn() -> Iterator[LogitsOf]:
        generator = torch.Generator().manual_seed(0)
        weights = dict(model.model.named_parameters())
        for _ in range(draws):
            moved = {f"model.{name}": weights[name] + x for name, x in noise(generator).items()}
            yield partial(functional_call, model.logits_model, moved)

    return Members(drawn)


# --- Training-Free Bayesianization (Shi et al., arXiv:2412.05723) -----------------------------

MOST_CHANGED = 0.01  # share of the training texts whose class may change
REACH_OF_NOISE = (1e-4, 10.0)
BISECTIONS = 10
MOST_TEXTS = 500


def training_free(
    model: AdaptedModel, train: DataLoader | list[Any], draws: int = SAMPLES
) -> Members:
    """TFB by its label-free rule: the most noise that changes next to no predicted class."""
    weights = dict(model.model.named_parameters())
    bases = {
        name: noise_basis(weights[name.replace("lora_A", "lora_B")].detach())
        for name in weights
        if "lora_A" in name
    }
    texts = {"train": list(islice(train, MOST_TEXTS // (getattr(train, "batch_size", 0) or 1)))}
    classes = as_it_is(model).predict(texts)["train"].argmax(-1)

    def with_noise(log_sigma: float) -> Members:
        def noise(generator: torch.Generator) -> Weights:
            drawn = {}
            for name, basis in bases.items():
                standard = torch.randn(basis.shape[1], weights[name].shape[1], generator=generator)
                drawn[name] = math.exp(log_sigma) * basis @ standard.to(basis)
            return drawn

        return sampled(model, noise, draws)

    lower, upper = map(math.log, REACH_OF_NOISE)
    for _step in range(BISECTIONS):
        middle = (lower + upper) / 2
        found = with_noise(middle).predict(texts)["train"].argmax(-1)
        within = (found != classes).double().mean() <= MOST_CHANGED
        lower, upper = (middle, upper) if within else (lower, middle)
    return with_noise(lower)


def noise_basis(B: torch.Tensor) -> torch.Tensor:
    """What noise of lora_A is multiplied with, so that B @ lora_A has it along the columns of U.

    With the lora_B `U diag(d) Vᵀ` it is `V diag(1 / d)`; where d is 0, noise would change nothing.
    """
    _, d, Vh = torch.linalg.svd(B, full_matrices=False)
    rounding = max(B.shape) * torch.finfo(B.dtype).eps * d.amax()
    return Vh.mT * torch.where(d > rounding, 1 / d, 0)


# --- methods that train again -----------------------------------------------------------------


def retrained(recipe: Recipe, model: AdaptedModel, *_: DataLoader) -> Members:
    """Train again from the same start on the same texts, with deviations for the weights."""
    assert model.retrained is not None
    other = model.retrained(recipe).at(max(model.checkpoints))
    kept = other.checkpoints[max(other.checkpoints)]
    deviations = {name.removesuffix(DEVIATION): kept[name] for name in kept if DEVIATION in name}

    def noise(generator: torch.Generator) -> Weights:
        return {
            name: torch.randn(deviation.shape, generator=generator).to(deviation) * deviation
            for name, deviation in deviations.items()
        }

    return sampled(other, noise)


class BLoB(Recipe):
    """Mean-field variational lora_A (Wang et al., arXiv:2406.11675), with its program's settings.

    A weight's deviation is the square of a trained number. The loss is taken at flipout samples,
    and the divergence from the prior has steps of its own, by SGD.
    """

    name = "BLoB"
    start = 0.05
    prior_deviation = 0.2
    learning_rate = 0.002  # of the divergence; the program's for encoders

    def prepare(self, model: nn.Module) -> None:
        for name, module in list(model.named_modules()):
            if "lora_A." in name and isinstance(module, nn.Linear):
                spread = torch.empty_like(module.weight)
                nn.init.uniform_(spread, self.start / math.sqrt(2), self.start)
                module.register_parameter("spread", nn.Parameter(spread))
                module.register_forward_hook(self._add_noise)

    def _add_noise(self, module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        if not module.training:
            return output
        signs = [torch.randn_like(part).sign() for part in (inputs[0], output)]
        noise = module.spread.square() * torch.randn_like(module.spread)
        return output + (inputs[0] * signs[0]) @ noise.mT * signs[1]

    def after_step(self, model: nn.Module, step: int, steps_an_epoch: int, pace: float) -> None:
        # The last batches of an epoch carry most of its divergence.
        place = (step - 1) % steps_an_epoch + 1
        rate = self.learning_rate * pace * 2.0 ** (place - steps_an_epoch - 1)
        variance = self.prior_deviation**2
        with torch.no_grad():
            for module in model.modules():
                if isinstance(spread := getattr(module, "spread", None), nn.Parameter):
                    weight: Any = module.weight
                    weight -= rate * weight / variance
                    spread -= rate * (2 * spread**3 / variance - 2 / spread)

    def deviations(self, model: nn.Module, optimizer: Any) -> Weights:
        named = model.named_parameters()
        spreads = {name: p for name, p in named if name.endswith(".spread")}
        return {
            name.replace(".spread", f".weight{DEVIATION}"): spread.detach().square()
            for name, spread in spreads.items()
        }


class IVONLoRA(Recipe):
    """Variational Newton's method on all LoRA weights (Cong et al., arXiv:2411.04421).

    The numbers are the paper's, except for the learning rate's schedule, which is the task's.
    """

    name = "IVON-LoRA"
    settings: ClassVar[dict[str, Any]] = {
        "lr": 0.03,
        "ess": 1e7,
        "hess_init": 3e-4,
        "beta2": 0.99999,
        "weight_decay": 1e-6,
        "clip_radius": 1e-3,
    }

    def optimizer(self, weights: list[nn.Parameter], settings: Hyperparameters) -> Any:
        import ivon  # only this rival needs it

        return ivon.IVON(weights, **self.settings)

    def drawing(self, optimizer: Any) -> AbstractContextManager[Any]:
        return optimizer.sampled_params(train=True)

    def deviations(self, model: nn.Module, optimizer: Any) -> Weights:
        (group,) = optimizer.param_groups
        variance = 1 / (group["ess"] * (group["hess"] + group["weight_decay"]))
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        parts = variance.sqrt().split([p.numel() for p in trained.values()])
        return {
            name + DEVIATION: part.view_as(p)
            for (name, p), part in zip(trained.items(), parts, strict=True)
        }
