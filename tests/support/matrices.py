"""Models with other adapters than linear ones, and dense calculus."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.support.dense import (
    as_padded,
    derivatives_of,
    kronecker_block,
    logits_of,
    softmax_fisher,
)
from tests.support.models import (
    CLASS_TOKEN_IDS,
    N_CLASSES,
    VOCABULARY,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import generator

Batch = Any

cross_entropy_sum = partial(cross_entropy, reduction="sum")


@dataclass(frozen=True)
class Case:
    """A model, batches of its examples, and what tells which weights take part."""

    model: nn.Module
    batches: list[Batch]
    # Keywords of the posterior.
    keywords: Mapping[str, Any] = field(default_factory=dict)
    n_experts: int = 1
    # How near the dense calculus comes: norms of some models run in float32.
    tolerance: float = 1e-9
    # The names of the weights that take part have one of these, and not that.
    names: Sequence[str] = ("lora_",)
    but: str = "lora_magnitude"
    likelihood: str = "classification"
    # The Fisher at logits, and the loss of logits and labels.
    fisher: Callable[[Tensor], Tensor] = softmax_fisher
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum

    def inputs(self, batch: Batch) -> Any:
        """Take a batch without its labels."""
        if isinstance(batch, dict):
            return without_labels(batch)
        X, _ = batch
        return X

    def all_inputs(self) -> list[Any]:
        """Take all batches without their labels."""
        return [self.inputs(batch) for batch in self.batches]

    def takes_part(self, name: str) -> bool:
        """Tell whether a weight of this name takes part."""
        if self.but in name:
            return False
        return any(part in name for part in self.names)

    def weights(self) -> dict[str, nn.Parameter]:
        """Find the weights that take part, in the order of the parameters."""
        weights = {}
        for name, weight in self.model.named_parameters():
            if self.takes_part(name):
                weights[name] = weight
        return weights

    def matrices(
        self,
        name: str,
        tensor: Tensor,
    ) -> list[Tensor]:
        """Cut a weight's tensors into matrices `(..., m, n)`, one an expert."""
        n_experts = self.n_experts
        if n_experts > 1 and ".experts." in name:
            if "lora_A" in name:
                # One expert's rows follow each other.
                return list(tensor.chunk(n_experts, dim=-2))
            # The experts' columns alternate.
            experts = range(n_experts)
            return [tensor[..., expert::n_experts] for expert in experts]
        shape = self.weights()[name].shape
        # A vector of magnitudes is a column.
        m = shape.numel() if "magnitude" in name else shape[0]
        n = shape.numel() // m
        # Those of examples and logits, where it is a Jacobian.
        n_leading = tensor.ndim - len(shape)
        leading = tensor.shape[:n_leading]
        return [tensor.reshape(*leading, m, n)]


@dataclass(frozen=True)
class Dense:
    """What dense calculus finds, each example treated by itself."""

    logits: Tensor  # (N, C)
    Js: list[Tensor]  # (N, C, m, n) of each matrix
    values: list[Tensor]  # (m, n) of each matrix

    @property
    def jacobian(self) -> Tensor:
        """All Jacobians, `(N, C, parameters)`."""
        of_matrices = [J.flatten(2) for J in self.Js]
        return torch.cat(of_matrices, dim=-1)

    @property
    def mean(self) -> Tensor:
        """All values, `(parameters,)`."""
        of_matrices = [value.flatten() for value in self.values]
        return torch.cat(of_matrices)

    def kronecker(self, H: Tensor) -> Tensor:
        """Compute the curvature of `kfac_approx="gradient"` at full rank."""
        blocks = [kronecker_block(J, H) for J in self.Js]
        return torch.block_diag(*blocks)


def dense(case: Case) -> Dense:
    """Differentiate each example's logits, alone."""
    case.model.eval()
    weights = case.weights()
    in_order = list(weights.values())
    logits: list[Tensor] = []
    by_example: list[list[Tensor]] = []
    for inputs in case.all_inputs():
        for example in _examples(inputs):
            of_example = logits_of(case.model, example)
            logits.append(of_example.detach())
            of_weights = _gradients(case.model, example, in_order)
            by_example.append(of_weights)

    Js: list[Tensor] = []
    values: list[Tensor] = []
    by_weight = zip(*by_example, strict=True)
    for name, of_weight in zip(weights, by_weight, strict=True):
        J = torch.stack(of_weight)
        value = weights[name].detach()
        Js += case.matrices(name, J)
        values += case.matrices(name, value)
    return Dense(torch.stack(logits), Js, values)


def _gradients(
    model: nn.Module,
    example: Any,
    weights: list[nn.Parameter],
) -> list[Tensor]:
    """Compute an example's Jacobians `(C, *shape)` by plain autograd."""
    before = [weight.requires_grad for weight in weights]
    for weight in weights:
        weight.requires_grad_()
    logits = logits_of(model, example)
    Js = derivatives_of(logits, weights)
    for weight, requires_grad in zip(weights, before, strict=True):
        weight.requires_grad_(requires_grad)
    return Js


def _examples(inputs: Any) -> list[Any]:
    """Take each example of a batch by itself, as a batch of one."""
    if isinstance(inputs, dict):
        n_examples = len(inputs["input_ids"])
        return [as_padded(inputs, row) for row in range(n_examples)]
    return list(inputs.split(1))


# --- cases ----------------------------------------------------------------------------


def drawn(model: nn.Module) -> nn.Module:
    """Draw an adapter's weights, which begin at 0, and go over to float64."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "trainable_tokens_delta" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def of_experts(family: str) -> Case:
    """Make a classifier with routed experts, adapted beside linear layers."""
    torch.manual_seed(0)
    # Each family has a name of its own for the number of experts.
    key = "num_local_experts" if family == "Mixtral" else "num_experts"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=6,
        moe_intermediate_size=6,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts_per_tok=2,
        num_labels=N_CLASSES,
        pad_token_id=0,
        attn_implementation="eager",
        experts_implementation="eager",  # the others have no float64
        **{key: 3},
    )
    classifier = getattr(transformers, f"{family}ForSequenceClassification")
    lora = LoraConfig(
        task_type="SEQ_CLS",
        r=2,
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    lengths = (5, 3, 4, 2, 5)
    model = get_peft_model(classifier(config), lora)
    return Case(
        model=drawn(model),
        batches=ragged_batches(lengths, padded_to=5),
        n_experts=3,
        tolerance=1e-4,
    )


def of_mixtral() -> Case:
    """Adapt Mixtral's experts."""
    return of_experts("Mixtral")


def of_qwen() -> Case:
    """Adapt Qwen3's experts."""
    return of_experts("Qwen3Moe")


def of_embedding() -> Case:
    """Adapt an encoder's embedding of words beside a linear layer."""
    layers = ["word_embeddings", "query"]
    model = lora_model("bert", target_modules=layers)
    return Case(drawn(model), ragged_batches())


def of_tokens() -> Case:
    """Train some tokens beside a linear layer."""
    tokens = [3, 17, 40, 41]
    model = lora_model(
        "bert",
        target_modules=["query"],
        trainable_token_indices=tokens,
    )
    return Case(
        model=drawn(model),
        batches=ragged_batches(),
        names=("lora_", "trainable_tokens_delta"),
    )


def of_activated() -> Case:
    """Adapt only what follows some tokens, by aLoRA, which one of the texts lacks."""
    invocation = 9
    other = 10
    batches = ragged_batches()
    for batch in batches:
        batch["input_ids"][:, 1] = invocation
    first, *_ = batches
    first["input_ids"][1, 1] = other
    model = lora_model("gpt2", alora_invocation_tokens=[invocation])
    return Case(
        model=drawn(model),
        batches=batches,
        keywords={"class_token_ids": CLASS_TOKEN_IDS},
    )


def of_singular_values() -> Case:
    """Adapt by AdaLoRA, whose matrices are three."""
    torch.manual_seed(0)
    base = lora_model("bert").unload()
    config = AdaLoraConfig(
        task_type="SEQ_CLS",
        target_modules=["query", "value"],
        init_r=3,
        total_step=10,
    )
    model = get_peft_model(base, config)
    return Case(drawn(model), ragged_batches())


class Images(nn.Module):
    """Two convolutions, one in groups, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 2, groups=2)
        self.last = nn.Linear(4, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        pixels = self.second(hidden).tanh()
        of_images = pixels.flatten(-2).mean(-1)
        return self.last(of_images)


def numbers(*shape: int) -> list[tuple[Tensor, Tensor]]:
    """Make batches of five examples and two, of numbers of a shape."""
    draws = generator(1)
    batches: list[tuple[Tensor, Tensor]] = []
    for n in (5, 2):
        X = torch.randn(n, *shape, generator=draws)
        labels = torch.arange(n) % N_CLASSES
        batches.append((X.double(), labels))
    return batches


def of_convolutions(**lora: Any) -> Case:
    """Adapt convolutions beside a linear layer."""
    torch.manual_seed(0)
    layers = ["first", "second", "last"]
    config = LoraConfig(r=2, target_modules=layers, **lora)
    model = get_peft_model(Images(), config)
    # Two channels of five by five pixels.
    return Case(drawn(model), numbers(2, 5, 5))


def of_convolutions_with_magnitudes() -> Case:
    """Adapt convolutions by DoRA beside a linear layer."""
    return of_convolutions(use_dora=True)


CASES: dict[str, Callable[[], Case]] = {
    "LoRA of experts (Mixtral)": of_mixtral,
    "LoRA of experts (Qwen3-MoE)": of_qwen,
    "LoRA of an embedding": of_embedding,
    "trainable tokens": of_tokens,
    "aLoRA": of_activated,
    "AdaLoRA": of_singular_values,
    "LoRA of convolutions": of_convolutions,
    "DoRA of convolutions": of_convolutions_with_magnitudes,
}
