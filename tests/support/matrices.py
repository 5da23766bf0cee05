"""Cases with weights of every kind."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.support.cases import Case, unpadded_rows
from tests.support.models import (
    CLASS_TOKEN_IDS,
    N_CLASSES,
    RAGGED,
    VOCABULARY,
    built,
    lora_model,
    ragged_batches,
)
from tests.support.posteriors import generator

# --- rows of linear layers ------------------------------------------------------------


def of_linear_layers() -> Case:
    """Adapt an encoder's linear layers."""
    return Case(lora_model("bert").eval(), ragged_batches())


def of_answers(kind: str = "gpt2", side: str = "left") -> Case:
    """Adapt a language model that answers after the last token."""
    return Case(
        lora_model(kind).eval(),
        ragged_batches(padding_side=side),
        keywords={"class_token_ids": CLASS_TOKEN_IDS},
        split=unpadded_rows,
    )


class Prompts(nn.Module):
    """Tokenises prompts, one token a letter, and reads the answer behind them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Any] | None = None, **inputs: Any) -> Tensor:
        texts = []
        for prompt in (batch or inputs)["prompt"]:
            letters = torch.tensor([ord(letter) for letter in prompt])
            texts.append(letters % VOCABULARY)
        ids = pad_sequence(texts, batch_first=True)
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        logits = self.model(ids, attention_mask=mask).logits
        at_last = logits[torch.arange(len(ids)), mask.sum(-1) - 1]
        return at_last[:, CLASS_TOKEN_IDS]


def of_strings() -> Case:
    """Let a module of the user's read prompts that are no tokens yet."""
    texts = ["Is it?", "Or not to be?", "Why"], ["A question", "No"]
    labels = [0, 2, 1], [1, 1]
    batches = [
        {"prompt": of_batch, "labels": torch.tensor(right)}
        for of_batch, right in zip(texts, labels, strict=True)
    ]
    return Case(Prompts(lora_model("gpt2").eval()), batches)


def of_multiple_choice() -> Case:
    """Make batches `(B, K, T)`, of three examples and of one, with three answers."""
    base = built(
        "BertForMultipleChoice", num_hidden_layers=2, attn_implementation="eager"
    )
    lora = LoraConfig(r=2, target_modules=["query", "value"])
    model = get_peft_model(base, lora)
    # Larger than weights begin, so that answers differ; and no B is 0.
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    (texts,) = ragged_batches((7, 4, 5, 7, 3, 6) * 2, batch_size=12)
    columns = {
        "input_ids": texts["input_ids"].unflatten(0, (4, 3)),
        "attention_mask": texts["attention_mask"].unflatten(0, (4, 3)),
        "labels": texts["labels"][:4],
    }
    batches = [
        {name: column[rows] for name, column in columns.items()}
        for rows in (slice(0, 3), slice(3, 4))
    ]
    return Case(model.double().eval(), batches)


LINEAR: dict[str, Callable[[], Case]] = {
    "LoRA of an encoder": of_linear_layers,
    "LoRA of a decoder, padded left": of_answers,
    "LoRA of a decoder with rotations": partial(of_answers, "gpt_neox", "right"),
    "prompts as strings": of_strings,
    "multiple choice": of_multiple_choice,
}


# --- weights whose rows no hook sees --------------------------------------------------


def drawn(model: nn.Module) -> nn.Module:
    """Draw an adapter's weights, which begin at 0, and go over to float64."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "trainable_tokens_delta" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def of_experts(family: str) -> Case:
    """Make a classifier with routed experts, adapted beside linear layers."""
    # Each family has a name of its own for the number of experts.
    key = "num_local_experts" if family == "Mixtral" else "num_experts"
    base = built(
        f"{family}ForSequenceClassification",
        hidden_size=8,
        intermediate_size=6,
        moe_intermediate_size=6,
        num_hidden_layers=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts_per_tok=2,
        attn_implementation="eager",
        experts_implementation="eager",  # the others have no float64
        **{key: 3},
    )
    lora = LoraConfig(
        task_type="SEQ_CLS",
        r=2,
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    return Case(
        model=drawn(get_peft_model(base, lora)),
        batches=ragged_batches((5, 3, 4, 2, 5), padded_to=5),
        tolerance=1e-4,
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
    names = ("lora_", "trainable_tokens_delta")
    return Case(drawn(model), ragged_batches(), names=names)


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
    return Case(drawn(get_peft_model(base, config)), ragged_batches())


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
    model = drawn(get_peft_model(Images(), config))
    draws = generator(1)
    batches: list[tuple[Tensor, Tensor]] = []
    for n in (5, 2):
        # Two channels of five by five pixels.
        X = torch.randn(n, 2, 5, 5, generator=draws).double()
        batches.append((X, torch.arange(n) % N_CLASSES))
    return Case(model, batches)


CASES: dict[str, Callable[[], Case]] = {
    "LoRA of experts (Mixtral)": partial(of_experts, "Mixtral"),
    "LoRA of experts (Qwen3-MoE)": partial(of_experts, "Qwen3Moe"),
    "LoRA of an embedding": of_embedding,
    "trainable tokens": of_tokens,
    "aLoRA": of_activated,
    "AdaLoRA": of_singular_values,
    "LoRA of convolutions": of_convolutions,
    "DoRA of convolutions": partial(of_convolutions, use_dora=True),
}
