"""Models with other adapters than linear ones, and dense calculus."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import nn

from tests.support.dense import kronecker_block, softmax_fisher
from tests.support.models import (
    CLASS_TOKEN_IDS,
    N_CLASSES,
    VOCABULARY,
    lora_model,
    ragged_batches,
    without_labels,
)

Batch = Any


@dataclass(frozen=True)
class Case:
    """A model, its call, and batches; `matrices` cut its parameters."""

    model: nn.Module
    batches: list[Batch]
    keywords: Mapping[str, Any]
    n_experts: int = 1
    tolerance: float = 1e-9  # norms of some models run in float32
    # What is in the names of the weights that take part.
    names: Sequence[str] = ("lora_",)
    but: str = "lora_magnitude"  # and what is not
    by_differences: bool = False  # whether Jacobians are finite differences

    def inputs(self, batch: Batch) -> Any:
        """Take a batch without its labels."""
        return without_labels(batch) if isinstance(batch, dict) else batch[0]

    def labels(self) -> torch.Tensor:
        """Join the labels of all batches."""
        labels: list[torch.Tensor] = []
        for batch in self.batches:
            of_batch = batch["labels"] if isinstance(batch, dict) else batch[1]
            labels.append(of_batch)
        return torch.cat(labels)

    def logits(self, inputs: Any) -> torch.Tensor:
        """Compute logits `(B, C)` by the model's plain output."""
        output = (
            self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)
        )
        logits = getattr(output, "logits", output)
        # Of a language model, whose answer is after the last token.
        if logits.ndim == 3:
            last = inputs["attention_mask"].sum(-1) - 1
            at_last = logits[torch.arange(len(logits)), last]
            logits = at_last[:, CLASS_TOKEN_IDS]
        return logits

    def weights(self) -> dict[str, nn.Parameter]:
        """Find the weights that take part, in the order of the parameters."""
        weights: dict[str, nn.Parameter] = {}
        for name, weight in self.model.named_parameters():
            takes_part = any(part in name for part in self.names)
            if takes_part and self.but not in name:
                weights[name] = weight
        return weights

    def matrices(
        self,
        name: str,
        tensor: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Cut a weight's tensors into matrices `(..., m, n)`, one an expert."""
        if self.n_experts > 1 and ".experts." in name:
            if "lora_A" in name:
                # One expert's rows follow each other.
                n_rows = tensor.shape[-2] // self.n_experts
                return list(tensor.split(n_rows, dim=-2))
            # The experts' columns alternate.
            return [
                tensor[..., expert :: self.n_experts]
                for expert in range(self.n_experts)
            ]
        shape = self.weights()[name].shape
        m = shape.numel() if "magnitude" in name else shape[0]
        n = shape.numel() // m
        leading = tensor.shape[: tensor.ndim - len(shape)]
        return [tensor.reshape(*leading, m, n)]


@dataclass(frozen=True)
class Dense:
    """Logits `(N, C)`, and Jacobians and values of each matrix, by examples alone."""

    logits: torch.Tensor
    Js: list[torch.Tensor]  # `(N, C, m, n)` each
    values: list[torch.Tensor]  # `(m, n)` each

    @property
    def jacobian(self) -> torch.Tensor:
        """All Jacobians, `(N, C, parameters)`."""
        return torch.cat([J.flatten(2) for J in self.Js], dim=-1)

    @property
    def mean(self) -> torch.Tensor:
        """All values, `(parameters,)`."""
        return torch.cat([value.flatten() for value in self.values])

    def kronecker(self) -> torch.Tensor:
        """Compute the curvature of `kfac_approx="gradient"` at full rank."""
        H = softmax_fisher(self.logits)
        blocks = [kronecker_block(J, H) for J in self.Js]
        return torch.block_diag(*blocks)


def dense(case: Case) -> Dense:
    """Differentiate each example's logits, alone."""
    case.model.eval()
    weights = case.weights()
    differentiate = _differences if case.by_differences else _gradients
    logits: list[torch.Tensor] = []
    of_examples: list[list[torch.Tensor]] = []
    for batch in case.batches:
        for example in _examples(case.inputs(batch)):
            with torch.no_grad():
                logits += case.logits(example)
            of_examples.append(differentiate(case, example, list(weights.values())))
    Js: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    by_weight = zip(*of_examples, strict=True)
    for (name, weight), J in zip(weights.items(), by_weight, strict=True):
        Js += case.matrices(name, torch.stack(J))
        values += case.matrices(name, weight.detach())
    return Dense(torch.stack(logits), Js, values)


def _gradients(
    case: Case,
    example: Any,
    weights: list[nn.Parameter],
) -> list[torch.Tensor]:
    """Compute an example's Jacobians `(C, *shape)` by plain autograd."""
    before = [weight.requires_grad for weight in weights]
    for weight in weights:
        weight.requires_grad_()
    (logits,) = case.logits(example)
    rows: list[Sequence[torch.Tensor]] = []
    for logit in logits:
        of_logit = torch.autograd.grad(
            logit,
            weights,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        rows.append(of_logit)
    for weight, requires_grad in zip(weights, before, strict=True):
        weight.requires_grad_(requires_grad)
    return [torch.stack(of_weight) for of_weight in zip(*rows, strict=True)]


@torch.no_grad()
def _differences(
    case: Case,
    example: Any,
    weights: list[nn.Parameter],
) -> list[torch.Tensor]:
    """Compute Jacobians `(C, *shape)` of one example by central differences."""
    step = 1e-5
    Js: list[torch.Tensor] = []
    for weight in weights:
        numbers_of_weight = weight.view(-1)
        columns: list[torch.Tensor] = []
        for place, number in enumerate(numbers_of_weight.tolist()):
            numbers_of_weight[place] = number + step
            (ahead,) = case.logits(example)
            numbers_of_weight[place] = number - step
            (behind,) = case.logits(example)
            numbers_of_weight[place] = number
            columns.append((ahead - behind) / (2 * step))
        J = torch.stack(columns, dim=-1)
        Js.append(J.unflatten(-1, weight.shape))
    return Js


def _examples(inputs: Any) -> list[Any]:
    """Take each example of a batch by itself, as a batch of one."""
    if not isinstance(inputs, dict):
        return list(inputs.split(1))
    by_key = [value.split(1) for value in inputs.values()]
    return [dict(zip(inputs, rows, strict=True)) for rows in zip(*by_key, strict=True)]


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
    experts = {"num_local_experts": 3} if family == "Mixtral" else {"num_experts": 3}
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
        **experts,
    )
    base = getattr(transformers, f"{family}ForSequenceClassification")(config)
    lora = LoraConfig(
        task_type="SEQ_CLS",
        r=2,
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    model = drawn(get_peft_model(base, lora))
    batches = ragged_batches(lengths=(5, 3, 4, 2, 5), padded_to=5)
    return Case(model, batches, {}, n_experts=3, tolerance=1e-4)


def of_mixtral() -> Case:
    """Adapt Mixtral's experts."""
    return of_experts("Mixtral")


def of_qwen() -> Case:
    """Adapt Qwen3's experts."""
    return of_experts("Qwen3Moe")


def of_embedding() -> Case:
    """Adapt an encoder's embedding of words beside a linear layer."""
    model = lora_model("bert", target_modules=["word_embeddings", "query"])
    return Case(drawn(model), ragged_batches(), {})


def of_tokens() -> Case:
    """Train some tokens beside a linear layer."""
    tokens = [3, 17, 40, 41]
    model = lora_model("bert", target_modules=["query"], trainable_token_indices=tokens)
    names = ("lora_", "trainable_tokens_delta")
    return Case(drawn(model), ragged_batches(), {}, names=names)


def of_activated() -> Case:
    """Adapt only what follows some tokens, by aLoRA, which one of the texts lacks."""
    batches = ragged_batches()
    for batch in batches:
        batch["input_ids"][:, 1] = 9
    batches[0]["input_ids"][1, 1] = 10
    model = lora_model("gpt2", alora_invocation_tokens=[9])
    return Case(drawn(model), batches, {"class_token_ids": CLASS_TOKEN_IDS})


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
    return Case(drawn(get_peft_model(base, config)), ragged_batches(), {})


class Images(nn.Module):
    """Two convolutions, one in groups, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 2, groups=2)
        self.last = nn.Linear(4, N_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).tanh()).tanh()
        return self.last(x.mean((-2, -1)))


class Sequences(nn.Module):
    """Attention over the positions of an example, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, N_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(x, x, x)
        return self.last(attended.tanh().mean(1))


def numbers(
    *shape: int,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make batches of five examples and two, of numbers of a shape."""
    generator = torch.Generator().manual_seed(1)
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    for n in (5, 2):
        X = torch.randn(n, *shape, generator=generator)
        labels = torch.arange(n) % N_CLASSES
        batches.append((X.double(), labels))
    return batches


def of_convolutions(**lora: Any) -> Case:
    """Adapt convolutions beside a linear layer."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["first", "second", "last"], **lora)
    return Case(drawn(get_peft_model(Images(), config)), numbers(2, 5, 5), {})


def of_convolutions_with_magnitudes() -> Case:
    """Adapt convolutions by DoRA beside a linear layer."""
    return of_convolutions(use_dora=True)


def of_attention() -> Case:
    """Adapt an attention module beside a linear layer."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["attention", "last"])
    model = drawn(get_peft_model(Sequences(), config))
    # What PEFT gives autograd is not the derivative of what it computes.
    return Case(model, numbers(3, 4), {}, tolerance=1e-6, by_differences=True)


CASES: dict[str, Callable[[], Case]] = {
    "LoRA of experts (Mixtral)": of_mixtral,
    "LoRA of experts (Qwen3-MoE)": of_qwen,
    "LoRA of an embedding": of_embedding,
    "trainable tokens": of_tokens,
    "aLoRA": of_activated,
    "AdaLoRA": of_singular_values,
    "LoRA of convolutions": of_convolutions,
    "DoRA of convolutions": of_convolutions_with_magnitudes,
    "LoRA of nn.MultiheadAttention": of_attention,
}
