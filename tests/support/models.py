"""Small models with LoRA adapters, and ragged batches for them."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from torch import Tensor, nn

Batch = dict[str, Tensor]

VOCABULARY = 60
# The answers of language models that classify: any tokens but padding, which is 0.
CLASS_TOKEN_IDS = [11, 23, 42]
N_CLASSES = len(CLASS_TOKEN_IDS)

TARGET_MODULES = {
    "bert": ["query", "value"],
    "gpt2": ["c_attn", "c_proj"],
    "gpt_neox": ["query_key_value", "dense_4h_to_h"],
}


NAMES = {
    "bert": "BertForSequenceClassification",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Draw standard normal numbers in float64."""
    # In float32 first, so that both precisions have the same numbers.
    return torch.randn(*shape, generator=generator(seed)).double()


def base_model(
    kind: str, n_labels: int = N_CLASSES, hidden_size: int = 12
) -> nn.Module:
    """Initialise a two-layer model at random; only "bert" classifies."""
    # Eager attention of newer GPT-NeoX gives NaN for padded rows in float64.
    has_sdpa = kind == "gpt_neox" and transformers.GPTNeoXForCausalLM._supports_sdpa
    model = built(
        NAMES[kind],
        # Token 0 is padding as well, and in no text.
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0 if kind == "bert" else None,
        hidden_size=hidden_size,
        num_hidden_layers=2,
        # Another size than the hidden one, so that no dimension passes for another.
        intermediate_size=2 * hidden_size,
        max_position_embeddings=64,
        num_labels=n_labels,
        attn_implementation="sdpa" if has_sdpa else "eager",
        rotary_pct=1.0,
    )
    return model.train()


def built(name: str, **settings: Any) -> nn.Module:
    """Initialise a model of one layer at random, of a class of transformers."""
    torch.manual_seed(0)
    make_model = getattr(transformers, name)
    defaults: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "num_labels": N_CLASSES,
        "pad_token_id": 0,
    }
    return make_model(make_model.config_class(**defaults | settings)).eval()


def lora_model(
    kind: str,
    dtype: torch.dtype = torch.float64,
    n_labels: int = N_CLASSES,
    hidden_size: int = 12,
    **lora_config: object,
) -> PeftModel:
    """Make a PEFT model with an adapter of rank 2 that is not 0."""
    settings = {
        "task_type": "SEQ_CLS" if kind == "bert" else "CAUSAL_LM",
        "r": 2,
        # A scaling of 2: where it was forgotten, nothing would come out right.
        "lora_alpha": 4,
        # A pass in training mode would be seen in any number.
        "lora_dropout": 0.1,
        "target_modules": TARGET_MODULES[kind],
        "fan_in_fan_out": kind == "gpt2",
    } | lora_config
    base = base_model(kind, n_labels, hidden_size)
    model = get_peft_model(base, LoraConfig(**settings))
    # These begin at 0, where nothing depends on the other matrix.
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            nn.init.normal_(parameter, std=0.3)
        # With a head as small as a new one, all texts have nearly the same logits.
        elif "classifier" in name or "score" in name:
            nn.init.normal_(parameter, std=0.5)
    return model.to(dtype)


def untrained(model: nn.Module) -> nn.Module:
    """Set an adapter's B to 0, as PEFT begins."""
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(weight)
    return model


def llama() -> Any:
    """Initialise a causal language model of three layers at random, for float32."""
    return built(
        "LlamaForCausalLM",
        num_hidden_layers=3,
        num_key_value_heads=1,
        attn_implementation="eager",
        # An adapter in the output layer must not be one in the embedding.
        tie_word_embeddings=False,
    )


def llama_with_output_layer() -> PeftModel:
    """Make a language model whose adapter is in the output layer as well."""
    targets = ["q_proj", "v_proj", "lm_head"]
    # With B at 0, as PEFT begins, it would be as good as none.
    lora = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    return get_peft_model(llama(), lora)


def head_of(model: nn.Module) -> nn.Module:
    """Find the one layer that PEFT trains beside the adapter."""
    (head,) = (
        module
        for name, module in model.named_modules()
        if name.endswith("modules_to_save.default")
    )
    return head


def without_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """Leave the labels out of a batch."""
    return {key: value for key, value in batch.items() if key != "labels"}


def part_of(batch: Mapping[str, Any], place: Any) -> dict[str, Any]:
    """Take some examples of a batch by a slice, or one as a data set has it."""
    return {key: column[place] for key, column in batch.items()}


# In batches of three the last has two texts; those of seven tokens have no padding.
RAGGED = (7, 4, 5, 7, 3, 6, 2, 7)


def ragged_batches(
    lengths: Sequence[int] = RAGGED,
    batch_size: int = 3,
    padding_side: str = "right",
    padded_to: int = 7,
    n_classes: int = N_CLASSES,
    seed: int = 1,
) -> list[Batch]:
    """Make batches of the same examples, whatever the batch size and the padding."""
    # All texts are drawn before they are divided, so that batches change none.
    draws = generator(seed)
    input_ids = torch.full((len(lengths), padded_to), 0)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        # Token 0 is padding, and in no text.
        tokens = torch.randint(1, VOCABULARY, (length,), generator=draws)
        start = 0 if padding_side == "right" else padded_to - length
        input_ids[row, start : start + length] = tokens
        attention_mask[row, start : start + length] = 1
    labels = torch.randint(0, n_classes, (len(lengths),), generator=draws)
    columns = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": labels,
    }
    return [
        part_of(columns, slice(start, start + batch_size))
        for start in range(0, len(lengths), batch_size)
    ]


def one_by_one(batches: Iterable[Batch]) -> list[Batch]:
    """Take the examples of batches, as a data set has them."""
    return [
        part_of(batch, row) for batch in batches for row in range(len(batch["labels"]))
    ]


def first_batch(**ragged: Any) -> Batch:
    """Make the first of `ragged_batches`, of three texts by default."""
    first, *_ = ragged_batches(**ragged)
    return first


class TwoLinear(nn.Module):
    """A plain module without transformers or PEFT wrappers, for `(X, y)` batches."""

    def __init__(self, n_outputs: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Sorting(nn.Module):
    """A layer without gradients, as in sparse attention, and one with them."""

    def __init__(self, with_gradients: bool = True) -> None:
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.unused = nn.Linear(5, 3)
        self.with_gradients = with_gradients

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            order = self.unused(x).argsort()
        with torch.set_grad_enabled(self.with_gradients):
            return self.used(x) + order


class OfBatches(nn.Module):
    """A user's wrapper, which is given whole batches."""

    def __init__(self, model: nn.Module, output: str = "logits") -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, batch: Any = None, **inputs: Any) -> Tensor:
        return getattr(self.model(**batch or inputs), self.output)


class OfMapping(OfBatches):
    """Around a module of a mapping: it also takes its keys as keywords."""

    def forward(self, batch: Any = None, **inputs: Tensor) -> Tensor:
        return self.model(inputs if batch is None else batch)


def with_lora(
    model: nn.Module, *target_modules: str, **lora_config: object
) -> nn.Module:
    """Draw all weights, and add an adapter of rank 2 to the named layers, in float64.

    Its `lora_B` is not 0, and neither is A of an embedding.
    """
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    settings = {"r": 2, "target_modules": list(target_modules)} | lora_config
    inject_adapter_in_model(LoraConfig(**settings), model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_" in name:
            nn.init.normal_(parameter, std=0.5)
    return model.double()


def plain_model(n_outputs: int = 3, **lora_config: object) -> nn.Module:
    """Make a `TwoLinear` with an adapter in both layers."""
    return with_lora(TwoLinear(n_outputs=n_outputs), "first", "second", **lora_config)


def pairs(n_batches: int = 1, n: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Make batches `(X, y)` of `n` examples for `TwoLinear` with three outputs."""
    return [(X, torch.arange(n) % 3) for X in normal(n_batches, n, 5, seed=1)]


def sequences(n: int = 4, length: int = 3) -> tuple[Tensor, Tensor]:
    """Make inputs `(n, length, 5)` and labels for averaging models."""
    return normal(n, length, 5, seed=1), torch.arange(n) % 3


def record_calls(module: nn.Module) -> list[dict]:
    """Record the keyword arguments of each call of a module from now on."""
    calls: list[dict] = []
    forward = module.forward

    # No hook, since older versions of PEFT call `forward` itself.
    @functools.wraps(forward)
    def record(**kwargs: Any) -> Any:
        calls.append(kwargs)
        return forward(**kwargs)

    module.forward = record
    return calls
