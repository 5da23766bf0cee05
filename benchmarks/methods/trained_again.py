"""Rivals that train again: with one model, or with draws around its weights."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, LoraModel
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from benchmarks.methods.method import Members, ensemble
from benchmarks.methods.sampled import sampled
from benchmarks.models import AdaptedModel
from benchmarks.training import Hyperparameters, Recipe, Weights
from laplace_lora_ext.models.adapters import find_peft_model

DEVIATION = ".deviation"  # after a weight's name: its standard deviation


def alone(recipe: Recipe, model: AdaptedModel, _: DataLoader) -> Members:
    """Train again from the same start on the same texts."""
    assert model.retrained is not None
    return Members.of([model.retrained(recipe)])


class MonteCLoRA(Recipe):
    """A distribution of lora_A while training (Sengupta et al., arXiv:2411.04358).

    PEFT has it: a training step has means of samples of lora_A, and a prediction lora_A
    itself. Twenty held-out texts have chosen scale and divergence.
    """

    def __init__(self, scale: float = 3e-2, divergence: float = 1e-4) -> None:
        self.scale = scale  # of the samples
        self.divergence = divergence  # its weight in the loss
        self.name = f"MonteCLoRA, scale {scale:g}, divergence {divergence:g}"

    def adapters(self, lora: LoraConfig) -> LoraConfig:
        """Add PEFT's sampler to every layer."""
        from peft import MontecloraConfig  # PEFT has it since 2026

        return replace(
            lora,
            monteclora_config=MontecloraConfig(
                sample_scaler=self.scale, kl_loss_weight=self.divergence
            ),
        )

    def loss(self, model: nn.Module, batch: Any, labels: Tensor) -> Tensor:
        """Compute the mean loss of a batch, with PEFT's penalty."""
        layers = find_peft_model(model).base_model
        assert isinstance(layers, LoraModel)
        # PEFT's own trainers call it too.
        return super().loss(model, batch, labels) + layers._get_monteclora_loss()


class Distilled(Recipe):
    """A student of several models' mean probabilities.

    Source: Hinton et al., arXiv:1503.02531.
    """

    def __init__(self, teachers: Sequence[AdaptedModel]) -> None:
        self.teachers = teachers
        self.name = f"student of {len(teachers)} models"

    def loss(self, model: nn.Module, batch: Any, labels: Tensor) -> Tensor:
        """Compute the divergence from the teachers' mean probabilities."""
        with torch.no_grad():
            of_teachers = [
                each.logits_model(batch).softmax(-1) for each in self.teachers
            ]
        targets = torch.stack(of_teachers).mean(0)
        return kl_div(model(batch).log_softmax(-1), targets, reduction="batchmean")


def distilled(model: AdaptedModel, train: DataLoader) -> Members:
    """Train a student of an ensemble of other seeds and this one."""
    return alone(Distilled(ensemble(model)), model, train)


# --- draws by learnt deviations -------------------------------------------------------


def retrained(recipe: Recipe, model: AdaptedModel, _: DataLoader) -> Members:
    """Train again from the same start, with deviations for the weights."""
    assert model.retrained is not None
    other = model.retrained(recipe).at(max(model.checkpoints))
    last = max(other.checkpoints)
    deviations = {
        name.removesuffix(DEVIATION): kept
        for name, kept in other.checkpoints[last].items()
        if DEVIATION in name
    }

    def noise(generator: torch.Generator) -> Weights:
        drawn = {}
        for name, deviation in deviations.items():
            standard = torch.randn(deviation.shape, generator=generator)
            drawn[name] = standard.to(deviation) * deviation
        return drawn

    return sampled(other, noise)


class BLoB(Recipe):
    """Mean-field variational lora_A (Wang et al., arXiv:2406.11675).

    The settings are those of its program.

    A weight's deviation is the square of a trained number. The loss is taken at flipout
    samples, and the divergence from the prior has steps of its own, by SGD.
    """

    prior_deviation = 0.2

    def __init__(self, start: float = 0.05, divergence_rate: float = 0.002) -> None:
        self.start = start  # of the numbers whose squares are deviations, at most
        self.learning_rate = divergence_rate  # the program's for encoders
        self.name = f"BLoB, start {start:g}, rate of divergence {divergence_rate:g}"

    def prepare(self, model: nn.Module) -> None:
        """Add to every lora_A the numbers whose squares are its deviations."""
        for name, module in list(model.named_modules()):
            if "lora_A." in name and isinstance(module, nn.Linear):
                spread = torch.empty_like(module.weight)
                # Deviations are squares: from half of the largest one to this.
                least = self.start / math.sqrt(2)
                nn.init.uniform_(spread, least, self.start)
                module.register_parameter("spread", nn.Parameter(spread))
                module.register_forward_hook(self._add_noise)

    def _add_noise(
        self, module: Any, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        """Add flipout's noise: a draw for a batch, and signs for each example."""
        if not module.training:
            return output
        (x,) = inputs
        signs_of_inputs = torch.randn_like(x).sign()
        signs_of_outputs = torch.randn_like(output).sign()
        deviation = module.spread.square()
        noise = deviation * torch.randn_like(deviation)
        of_outputs = (x * signs_of_inputs) @ noise.mT
        return output + of_outputs * signs_of_outputs

    def after_step(
        self, model: nn.Module, step: int, steps_an_epoch: int, pace: float
    ) -> None:
        """Take a step down the divergence from the prior."""
        # The last batches of an epoch carry most of its divergence.
        place = (step - 1) % steps_an_epoch + 1
        share = 2.0 ** (place - steps_an_epoch - 1)
        rate = self.learning_rate * pace * share
        variance = self.prior_deviation**2
        with torch.no_grad():
            for module in model.modules():
                spread = getattr(module, "spread", None)
                if isinstance(module, nn.Linear) and isinstance(spread, nn.Parameter):
                    weight = module.weight
                    weight -= rate * weight / variance
                    slope = 2 * spread**3 / variance - 2 / spread
                    spread -= rate * slope

    def deviations(self, model: nn.Module, optimizer: Any) -> Weights:
        """Return the squares of the trained numbers."""
        deviations = {}
        for name, spread in model.named_parameters():
            if name.endswith(".spread"):
                weight_name = name.replace(".spread", ".weight")
                deviations[weight_name + DEVIATION] = spread.detach().square()
        return deviations


class IVONLoRA(Recipe):
    """Variational Newton's method on all LoRA weights (Cong et al., arXiv:2411.04421).

    Numbers are the paper's, whose program does not rescale the learning rate, but for
    that rate: with its 0.03 a weight moves by 3e-5 a step at most, and hardly trains
    in the lab's few steps. Twenty held-out texts have chosen it.
    """

    def __init__(
        self,
        learning_rate: float = 0.5,
        effective_size: float = 1e7,
        first_hessian: float = 3e-4,
    ) -> None:
        self.settings = {
            "lr": learning_rate,
            "ess": effective_size,
            "hess_init": first_hessian,
            "beta2": 0.99999,
            "weight_decay": 1e-6,
            "clip_radius": 1e-3,
            "rescale_lr": False,
        }
        # Trainings are kept by it.
        self.name = (
            f"IVON-LoRA, rate {learning_rate:g}, size {effective_size:g}, "
            f"first Hessian {first_hessian:g}"
        )

    def optimizer(self, weights: list[nn.Parameter], settings: Hyperparameters) -> Any:
        """Make IVON."""
        import ivon  # only this rival needs it

        return ivon.IVON(weights, **self.settings)

    def drawing(self, optimizer: Any) -> AbstractContextManager[Any]:
        """Make a context for gradients at a sample of the weights."""
        return optimizer.sampled_params(train=True)

    def deviations(self, model: nn.Module, optimizer: Any) -> Weights:
        """Return the deviations that the optimizer's Hessian gives."""
        (group,) = optimizer.param_groups
        # IVON's Hessian is of a mean loss, which counts for `ess` texts.
        precision = group["ess"] * (group["hess"] + group["weight_decay"])
        deviation = (1 / precision).sqrt()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # The optimizer keeps one long vector, in the order of the parameters.
        sizes = [weight.numel() for weight in trained.values()]
        parts = deviation.split(sizes)
        deviations = {}
        for name, part in zip(trained, parts, strict=True):
            deviations[name + DEVIATION] = part.view_as(trained[name])
        return deviations


# --- SWAG -----------------------------------------------------------------------------


class SWAG(Recipe):
    """A training that ends at a constant rate (Maddox et al., NeurIPS 2019).

    The learning rate falls as the paper's does, to a share of its first value, stays
    there for the tail, and iterates at equal distances of the tail are kept. Over LoRA
    weights: Onal et al., arXiv:2405.03425. Twenty held-out texts have chosen rate and
    tail.
    """

    def __init__(
        self, rate: float = 1.0, tail: float = 0.5, iterates: int = 20
    ) -> None:
        self.rate = rate  # share of the learning rate
        self.tail = tail  # share of the steps
        self.iterates = iterates
        self.name = f"SWAG, {iterates} iterates, tail {tail:g}, constant rate {rate:g}"

    def schedule(self, optimizer: Any, settings: Hyperparameters) -> Any:
        """Make the schedule: it warms up, falls, and is constant for the tail."""
        return LambdaLR(optimizer, partial(self.pace, settings=settings))

    def pace(self, steps_done: int, settings: Hyperparameters) -> float:
        """Return the share of the learning rate with which the next step is taken."""
        warmup = settings.warmup_steps
        if steps_done < warmup:
            return steps_done / warmup
        # Warming up may last until the tail begins, where few steps are asked for.
        n_falling = max(1, self._before_tail(settings) - warmup)
        fallen = (steps_done - warmup) / n_falling
        share_fallen = min(1.0, fallen)
        return 1 - share_fallen * (1 - self.rate)

    def kept_steps(self, settings: Hyperparameters) -> list[int]:
        """List the steps of the iterates."""
        first = self._before_tail(settings)
        tail = settings.steps - first
        count = min(self.iterates, tail)
        return [first + tail * number // count for number in range(1, count + 1)]

    def _before_tail(self, settings: Hyperparameters) -> int:
        """Count the steps before the tail, which has two at least.

        One iterate has no deviations.
        """
        before = round((1 - self.tail) * settings.steps)
        return min(before, settings.steps - 2)


@dataclass(frozen=True)
class Iterates:
    """The Gaussian of iterates, with a covariance half diagonal and half low-rank."""

    mean: Weights
    deviations: Weights  # of each iterate from the mean, (iterates, *shape)

    @classmethod
    def of(cls, iterates: Sequence[Weights]) -> "Iterates":
        """Compute mean and deviations.

        All iterates are in memory, so that deviations are from the mean of all, and not
        from that of the iterates so far.
        """
        means = {}
        deviations = {}
        for name in iterates[0]:
            of_weight = torch.stack([weights[name] for weights in iterates])
            mean = of_weight.mean(0)
            means[name] = mean
            deviations[name] = of_weight - mean
        return cls(means, deviations)

    def __call__(self, generator: torch.Generator) -> Weights:
        """Draw how far all weights are from the mean."""
        some_weight = next(iter(self.deviations.values()))
        count = len(some_weight)
        # Two covariances share the whole, hence the roots of 2.
        divisor = math.sqrt(2 * (count - 1))
        # The same numbers for all weights, which thus vary together.
        shared = torch.randn(count, generator=generator) / divisor
        drawn = {}
        for name, deviations in self.deviations.items():
            own = torch.randn(deviations.shape[1:], generator=generator)
            variance = deviations.square().mean(0)
            spread = variance.sqrt()
            diagonal = spread * own.to(spread) / math.sqrt(2)
            together = torch.tensordot(shared.to(deviations), deviations, dims=1)
            drawn[name] = diagonal + together
        return drawn


def of_iterates(recipe: Recipe, model: AdaptedModel, _: DataLoader) -> Members:
    """Train again, and draw from the Gaussian of the checkpoints.

    Training has the same start and the same texts.
    """
    assert model.retrained is not None
    other = model.retrained(recipe)
    iterates = list(other.checkpoints.values())
    noise = Iterates.of(iterates)
    last = max(other.checkpoints)
    # As if training had ended at the mean: draws are around the weights that it has.
    averaged = replace(other, checkpoints={last: noise.mean})
    return sampled(averaged.at(last), noise)
