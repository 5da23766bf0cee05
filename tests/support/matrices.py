"""Cases with weights of every kind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from tests.compatibility.kinds import with_frozen_a
from tests.support.cases import Case, unpadded_rows
from tests.support.models import (
    CLASS_TOKEN_IDS,
    N_CLASSES,
    RAGGED,
    TwoLinear,
    built,
    lora_model,
    pairs,
    part_of,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import normal
from tests.support.snapshots import half_trained

# --- rows of linear layers ------------------------------------------------------------


def of_answers() -> Case:
    """Adapt a language model that answers after the last token."""
    return Case(
        lora_model("gpt2").eval(),
        ragged_batches(padding_side="left"),
        keywords={"class_token_ids": CLASS_TOKEN_IDS},
        split=unpadded_rows,
    )


class Prompts(TwoLinear):
    """Reads how often each vowel is in prompts that are no tokens."""

    def forward(self, batch: Any = None, **inputs: Any) -> Tensor:
        counts = [
            [prompt.count(vowel) for vowel in "aeiou"]
            for prompt in (batch or inputs)["prompt"]
        ]
        return super().forward(torch.tensor(counts).double())


def of_strings() -> Case:
    """Let a module of the user's read prompts that are no tokens yet."""
    texts = ["Is it?", "Or not to be?", "Why"], ["A question", "No"]
    labels = [0, 2, 1], [1, 1]
    batches = [
        {"prompt": of_batch, "labels": torch.tensor(right)}
        for of_batch, right in zip(texts, labels, strict=True)
    ]
    return Case(with_lora(Prompts(), "first", "second"), batches)


def of_multiple_choice() -> Case:
    """Make batches `(B, K, T)`, of three examples and of one, with three answers."""
    base = built(
        "BertForMultipleChoice", num_hidden_layers=2, attn_implementation="eager"
    )
    model = with_lora(base, "query", "value").eval()
    (texts,) = ragged_batches((7, 4, 5, 7, 3, 6) * 2, batch_size=12)
    columns = {key: column.unflatten(0, (4, 3)) for key, column in texts.items()}
    columns["labels"] = columns["labels"][:, 0]
    batches = [part_of(columns, rows) for rows in (slice(3), slice(3, 4))]
    return Case(model, batches)


LINEAR: dict[str, Callable[[], Case]] = {
    # In the middle of a training.
    "LoRA of an encoder": lambda: Case(
        half_trained(lora_model("bert")), ragged_batches()
    ),
    "LoRA of a decoder, padded left": of_answers,
    "prompts as strings": of_strings,
    "multiple choice": of_multiple_choice,
}


# --- weights whose rows no hook sees --------------------------------------------------


PARTS = ("lora_", "trainable_tokens_delta", ".modules_to_save.default.")
"""What is in the names of an adapter's weights, heads included."""


def drawn(base: nn.Module, config: LoraConfig | None = None) -> PeftModel:
    """Add an adapter, and draw its weights, some of which begin at 0, in float64."""
    model: Any = get_peft_model(base, config) if config else base
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if any(part in name for part in PARTS):
            nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def of_experts() -> Case:
    """Make a classifier with routed experts, adapted beside linear layers."""
    base = built(
        "MixtralForSequenceClassification",
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts_per_tok=2,
        attn_implementation="eager",
        experts_implementation="eager",  # the others have no float64
        num_local_experts=3,
    )
    lora = LoraConfig(
        task_type="SEQ_CLS",
        r=2,
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    return Case(
        drawn(base, lora), ragged_batches((5, 3, 4, 2, 5), padded_to=5), tolerance=1e-4
    )


def of_embedding() -> Case:
    """Adapt an encoder's embedding of words beside a linear layer."""
    model = lora_model("bert", target_modules=["word_embeddings", "query"])
    # Of seven texts the last is alone in its batch.
    return Case(drawn(model), ragged_batches(RAGGED[:7]))


def of_tokens() -> Case:
    """Train some tokens beside a linear layer, with checkpointing."""
    tokens = [3, 17, 40, 41]
    model = lora_model("bert", target_modules=["query"], trainable_token_indices=tokens)
    model.gradient_checkpointing_enable()
    return Case(drawn(model), ragged_batches(), names=PARTS[:2])


def of_activated() -> Case:
    """Adapt only what follows some tokens, by aLoRA, which one of the texts lacks."""
    invocation, other = 9, 10
    batches = ragged_batches()
    for batch in batches:
        batch["input_ids"][:, 1] = invocation
    batches[0]["input_ids"][1, 1] = other
    model = lora_model("gpt2", alora_invocation_tokens=[invocation])
    return Case(drawn(model), batches, keywords={"class_token_ids": CLASS_TOKEN_IDS})


def of_singular_values() -> Case:
    """Adapt by AdaLoRA, whose matrices are three."""
    torch.manual_seed(0)
    base = lora_model("bert").unload()
    config = AdaLoraConfig(
        task_type="SEQ_CLS", target_modules=["query", "value"], init_r=3, total_step=10
    )
    return Case(drawn(base, config), ragged_batches())


class Images(nn.Module):
    """Two convolutions, one in groups, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 2, groups=2)
        self.last = nn.Linear(4, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.second(self.first(x).tanh()).tanh()
        return self.last(pixels.flatten(-2).mean(-1))


def of_convolutions(**lora: Any) -> Case:
    """Adapt convolutions beside a linear layer."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["first", "second", "last"], **lora)
    # Two channels of five by five pixels.
    batches = [
        (normal(n, 2, 5, 5, seed=n), torch.arange(n) % N_CLASSES) for n in (5, 2)
    ]
    return Case(drawn(Images(), config), batches)


CASES: dict[str, Callable[[], Case]] = {
    "LoRA of experts (Mixtral)": of_experts,
    "LoRA of an embedding": of_embedding,
    "trainable tokens": of_tokens,
    "aLoRA": of_activated,
    "AdaLoRA": of_singular_values,
    "LoRA of convolutions": of_convolutions,
    "DoRA of convolutions": partial(of_convolutions, use_dora=True),
}

# --- other selections than all LoRA weights -------------------------------------------


class WithHead(nn.Module):
    """An encoder and a head of three linear layers, with and without biases."""

    def __init__(self, n_outputs: int = N_CLASSES) -> None:
        super().__init__()
        # Before the encoder: blocks come in the order of the parameters, whatever their
        # kind.
        self.head = nn.Sequential(
            nn.Linear(6, 4),
            nn.Tanh(),
            nn.Linear(4, 4, bias=False),
            nn.Tanh(),
            nn.Linear(4, n_outputs),
        )
        self.encoder = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).tanh())


def plain(n_outputs: int = N_CLASSES) -> PeftModel:
    """Make a plain module with a head of three layers, in float64."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["encoder"], modules_to_save=["head"])
    return drawn(WithHead(n_outputs), config)


def classifier(name: str, *target_modules: str) -> PeftModel:
    """Make a one-layer classifier whose head PEFT trains by itself."""
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=list(target_modules))
    return drawn(built(name), config)


# Its head has two layers with biases.
roberta = partial(classifier, "RobertaForSequenceClassification", "query", "value")
# All tokens go through its head.
gpt_neox = partial(classifier, "GPTNeoXForSequenceClassification", "query_key_value")


def with_head(build: Callable[[], nn.Module], data: Callable[[], Any]) -> Case:
    """Let a model's head take part."""
    return Case(build().eval(), data(), {"modules_to_save": True}, names=PARTS)


def of_b_alone() -> Case:
    """Freeze A, as LoRA-FA does."""
    model = with_frozen_a(lora_model("bert").eval())
    return Case(model, ragged_batches(), names=["lora_B"])


SELECTIONS: dict[str, Callable[[], Case]] = {
    "a head of two layers": partial(with_head, roberta, ragged_batches),
    "a head of a plain module": partial(with_head, plain, partial(pairs, 2)),
    "a head for all tokens": partial(with_head, gpt_neox, ragged_batches),
    "B alone": of_b_alone,
}
