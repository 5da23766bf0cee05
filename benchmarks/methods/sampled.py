"""Rivals that predict with sampled weights: TFB, BLoB and IVON-LoRA."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from benchmarks.methods.method import LogitsOf, Members
from benchmarks.models import AdaptedModel
from benchmarks.training import Hyperparameters, Recipe, Weights

SAMPLES = 10  # as in the tables of these rivals' papers
DEVIATION = ".deviation"  # after a weight's name: its standard deviation

Noise = Callable[[torch.Generator], Weights]


def sampled(model: AdaptedModel, noise: Noise) -> Members:
    """Draw noise on the model's weights, and predict with each draw."""

    def drawn() -> Iterator[LogitsOf]:
        # Every data set, and every size of noise, gets the same draws.
        generator = torch.Generator().manual_seed(0)
        weights = dict(model.model.named_parameters())
        for _ in range(SAMPLES):
            moved = {}
            for name, shift in noise(generator).items():
                # The model that gives logits has the user's model as its `model`.
                moved[f"model.{name}"] = weights[name] + shift
            yield partial(functional_call, model.logits_model, moved)

    return Members(drawn)


# --- Training-Free Bayesianization (Shi et al., arXiv:2412.05723) ---------------------

MOST_CHANGED = 0.01  # share of the training texts whose class may change
REACH_OF_NOISE = (1e-4, 10.0)
# Halved ten times, five decades leave a size that is right to about 1 %.
BISECTIONS = 10
MOST_TEXTS = 500  # to look for changes in: each size of noise predicts all of them


@dataclass(frozen=True)
class NoiseOfLoraA:
    """Draws noise of lora_A: a basis of each layer times standard normal numbers."""

    bases: Weights
    widths: dict[str, int]  # of each lora_A
    sigma: float = 1.0

    def __call__(self, generator: torch.Generator) -> Weights:
        """Draw the noise of all layers."""
        noise = {}
        for name, basis in self.bases.items():
            _, rank = basis.shape
            standard = torch.randn(rank, self.widths[name], generator=generator)
            noise[name] = self.sigma * basis @ standard.to(basis)
        return noise


def training_free(model: AdaptedModel, train: DataLoader) -> Members:
    """Predict by TFB: as much noise as changes next to no predicted class."""
    noise = _noise_for(model)
    texts = _first_batches(train)
    classes = _predicted_classes(Members.of([model]), texts)
    # Noise changes by orders of magnitude, so its logarithm is halved.
    lower, upper = (math.log(end) for end in REACH_OF_NOISE)
    for _ in range(BISECTIONS):
        middle = (lower + upper) / 2
        noise_tried = replace(noise, sigma=math.exp(middle))
        tried = sampled(model, noise_tried)
        is_changed = _predicted_classes(tried, texts) != classes
        if is_changed.double().mean() <= MOST_CHANGED:
            lower = middle
        else:
            upper = middle
    # The upper end is a size that changes too many.
    noise_found = replace(noise, sigma=math.exp(lower))
    return sampled(model, noise_found)


def _noise_for(model: AdaptedModel) -> NoiseOfLoraA:
    """Find the bases of all layers."""
    weights = dict(model.model.named_parameters())
    bases = {}
    widths = {}
    for name, A in weights.items():
        if "lora_A" in name:
            B = weights[name.replace("lora_A", "lora_B")]
            bases[name] = noise_basis(B.detach())
            widths[name] = A.shape[1]
    return NoiseOfLoraA(bases, widths)


def _first_batches(train: Iterable[Any]) -> list[Any]:
    """Take as many batches as have 500 texts; a batch of unknown size counts as one."""
    batch_size = 1
    if isinstance(train, DataLoader) and train.batch_size is not None:
        batch_size = train.batch_size
    n_batches = MOST_TEXTS // batch_size
    return list(islice(train, n_batches))


def _predicted_classes(members: Members, texts: list[Any]) -> Tensor:
    probabilities = members.predict({"train": texts})["train"]
    return probabilities.argmax(-1)


def noise_basis(B: Tensor) -> Tensor:
    """Find the basis in which noise of lora_A gives B @ lora_A noise along U.

    With the lora_B `U diag(d) Vᵀ` it is `V diag(1 / d)`; where d is 0, noise would
    change nothing.
    """
    _, d, Vh = torch.linalg.svd(B, full_matrices=False)
    # A singular value this small is 0 but for rounding.
    precision = torch.finfo(B.dtype).eps
    rounding = max(B.shape) * precision * d.amax()
    reciprocal = torch.where(d > rounding, 1 / d, 0)
    return Vh.mT * reciprocal


# --- methods that train again ---------------------------------------------------------


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
