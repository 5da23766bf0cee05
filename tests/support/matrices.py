"""Models with weights of every kind, and dense calculus of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close

from tests.support.dense import (
    alone,
    curvature_of,
    evidence,
    glm_covariance,
    kronecker_block,
    labels_of,
    logits_of,
    predicted,
    softmax_fisher,
    unpadded,
)
from tests.support.models import (
    CLASS_TOKEN_IDS,
    N_CLASSES,
    RAGGED,
    VOCABULARY,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import generator, priors_of_blocks

Batch = Any

summed_cross_entropy = partial(cross_entropy, reduction="sum")


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
    loss: Callable[[Tensor, Tensor], Tensor] = summed_cross_entropy
    # Whether dense calculus leaves padding out, which moves what stands behind it.
    without_padding: bool = False

    def inputs(self, batch: Batch) -> Any:
        """Take a batch without its labels."""
        if isinstance(batch, dict):
            return without_labels(batch)
        X, _ = batch
        return X

    def all_inputs(self) -> list[Any]:
        """Take all batches without their labels."""
        return [self.inputs(batch) for batch in self.batches]

    def examples(self) -> list[Any]:
        """Take each example by itself, as a batch of one."""
        examples: list[Any] = []
        for inputs in self.all_inputs():
            if isinstance(inputs, Tensor):
                examples += inputs.split(1)
                continue
            for row in range(len(next(iter(inputs.values())))):
                of_row = {key: rows[row : row + 1] for key, rows in inputs.items()}
                examples.append(unpadded(of_row, 0) if self.without_padding else of_row)
        return examples

    def weights(self) -> dict[str, nn.Parameter]:
        """Find the weights that take part, in the order of the parameters."""
        return {
            name: weight
            for name, weight in self.model.named_parameters()
            if self.but not in name and any(part in name for part in self.names)
        }

    def matrices(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Cut a weight's tensors into matrices `(..., m, n)`, one an expert."""
        n_experts = self.n_experts
        if n_experts > 1 and ".experts." in name:
            if "lora_A" in name:
                # One expert's rows follow each other.
                return list(tensor.chunk(n_experts, dim=-2))
            # The experts' columns alternate.
            return [tensor[..., expert::n_experts] for expert in range(n_experts)]
        shape = self.weights()[name].shape
        # A vector of magnitudes is a column.
        m = shape.numel() if "magnitude" in name else shape[0]
        # Dimensions of examples and logits come first, where it is a Jacobian.
        leading = tensor.shape[: tensor.ndim - len(shape)]
        return [tensor.reshape(*leading, m, shape.numel() // m)]


@dataclass(frozen=True)
class Dense:
    """What dense calculus finds, each example treated by itself."""

    logits: Tensor  # (N, C)
    Js: list[Tensor]  # (N, C, m, n) of each matrix
    values: list[Tensor]  # (m, n) of each matrix

    @property
    def jacobian(self) -> Tensor:
        """All Jacobians, `(N, C, parameters)`."""
        return torch.cat([J.flatten(2) for J in self.Js], dim=-1)

    @property
    def mean(self) -> Tensor:
        """All values, `(parameters,)`."""
        return torch.cat([value.flatten() for value in self.values])

    def kronecker(self, H: Tensor) -> Tensor:
        """Compute the curvature of `kfac_approx="gradient"` at full rank."""
        return torch.block_diag(*[kronecker_block(J, H) for J in self.Js])


def dense(case: Case) -> Dense:
    """Differentiate each example's logits, alone."""
    case.model.eval()
    weights = case.weights()
    logits, jacobian = alone(case.model, logits_of, case.examples(), weights.values())
    n_numbers = [weight.numel() for weight in weights.values()]
    Js: list[Tensor] = []
    values: list[Tensor] = []
    of_weights = jacobian.split(n_numbers, dim=-1)
    for (name, weight), J in zip(weights.items(), of_weights, strict=True):
        Js += case.matrices(name, J.unflatten(-1, weight.shape))
        values += case.matrices(name, weight.detach())
    return Dense(logits, Js, values)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare matrices, relative to the largest entry of all."""
    # Entries near 0 are sums of large ones that cancel.
    atol = tolerance * expected.abs().max().item()
    assert_close(found, expected, rtol=0, atol=atol)


def assert_dense(la: Any, case: Case, expected: Dense, H: Tensor) -> None:
    """Compare a posterior's curvature, covariances and evidence with those of H.

    Each block has a prior precision of its own.
    """
    tolerance = case.tolerance
    assert torch.equal(la.mean, expected.mean)
    assert_near(curvature_of(la), H, tolerance)
    la.prior_precision = priors_of_blocks(la)
    n_weights = torch.tensor([value.numel() for value in expected.values])
    prior = la.prior_precision.repeat_interleave(n_weights)
    covariance = glm_covariance(expected.jacobian, H, prior)
    f_mu, f_var = predicted(la, case.all_inputs())
    assert_close(f_mu, expected.logits, rtol=tolerance, atol=tolerance)
    assert_near(f_var, covariance, tolerance)
    assert_near(la.functional_variance(expected.jacobian), covariance, tolerance)
    loss = case.loss(expected.logits, labels_of(case.batches))
    assert_close(la.loss, loss, rtol=tolerance, atol=0)
    log_evidence = evidence(H, -loss, expected.mean, prior)
    assert_close(la.log_marginal_likelihood(), log_evidence, rtol=tolerance, atol=0)


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
        without_padding=True,
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
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        attn_implementation="eager",
    )
    lora = LoraConfig(r=2, target_modules=["query", "value"])
    model = get_peft_model(transformers.BertForMultipleChoice(config), lora)
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
    return Case(
        model=drawn(get_peft_model(classifier(config), lora)),
        batches=ragged_batches((5, 3, 4, 2, 5), padded_to=5),
        n_experts=3,
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
