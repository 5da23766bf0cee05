"""Models of known shapes with random weights, random texts, and what is done with them.

They tell about speed and memory alone.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from laplace import ParametricLaplace
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BatchEncoding,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from benchmarks.methods.posteriors import LINK, lowrank_kron, stock
from benchmarks.models import AdaptedModel
from benchmarks.training import as_dataset
from laplace_lora_ext import LowRankKronLoRALaplace
from laplace_lora_ext.models.adapters import find_peft_model

LORA_B_SCALE = 0.02
MEANING = "random: they tell about shapes and speed only"  # of the weights


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, of its LoRA layers and of its batches; a class is one token."""

    hidden_size: int
    layers: int
    intermediate_size: int
    heads: int = 4
    key_value_heads: int | None = None  # as many as heads
    vocabulary: int = 1000  # small: embeddings cost all methods alike
    rank: int = 8
    target_modules: tuple[str, ...] | str = ("q_proj", "v_proj")
    classes: int = 4
    batch_size: int = 4
    length: int = 32
    dtype: str = "float32"
    kind: type[PreTrainedConfig] = LlamaConfig  # or one that takes the same sizes
    ties_embeddings: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.classes <= self.vocabulary:
            raise SystemExit(f"--classes must be from 2 to {self.vocabulary}")

    @property
    def config(self) -> PreTrainedConfig:
        """Return the configuration of the model."""
        sizes: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads or self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": max(2048, self.length),
            "tie_word_embeddings": self.ties_embeddings,
            "num_labels": self.classes,  # of a classifier
            **dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"], 0),
        }
        return self.kind(**sizes)


def random_llama(shape: Shape, device: str, seed: int) -> AdaptedModel:
    """Make a model on the device; only its LoRA weights are trainable."""
    base = random_base(
        AutoModelForCausalLM, shape.config, shape.dtype, device, seed=seed
    )
    model = with_random_lora(base, "CAUSAL_LM", shape.target_modules, shape.rank)
    return AdaptedModel(model, class_token_ids=list(range(shape.classes)))


def random_classifier(shape: Shape, device: str, seed: int) -> AdaptedModel:
    """Make a classifier in the same shape, whose head is trainable, too."""
    base = random_base(
        AutoModelForSequenceClassification, shape.config, shape.dtype, device, seed=seed
    )
    model = with_random_lora(base, "SEQ_CLS", shape.target_modules, shape.rank)
    return AdaptedModel(model)


def random_base(
    auto_class: Any,
    config: PreTrainedConfig,
    dtype: str,
    device: str,
    seed: int,
    **settings: Any,
) -> PreTrainedModel:
    """Make a model without LoRA, on the device at once and not by a copy on the CPU."""
    torch.manual_seed(seed)
    with torch.device(device):
        return auto_class.from_config(
            config, torch_dtype=getattr(torch, dtype), **settings
        )


def with_random_lora(
    base: PreTrainedModel,
    task_type: str,
    target_modules: Iterable[str] | str,
    rank: int,
    **settings: Any,
) -> PeftModel:
    """Add LoRA layers that look trained."""
    if not isinstance(target_modules, str):  # such as "all-linear"
        target_modules = list(target_modules)
    lora = LoraConfig(task_type=task_type, r=rank, target_modules=target_modules)
    model = get_peft_model(base, lora, **settings)
    assert isinstance(model, PeftModel)
    # PEFT starts lora_B at zero, where the curvature of lora_A is zero too.
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=LORA_B_SCALE)
    return model.eval()


def switch_checkpointing(model: nn.Module, on: bool) -> None:
    """Switch gradient checkpointing on or off, as a trainer would."""
    base = find_peft_model(model).get_base_model()
    assert isinstance(base, PreTrainedModel)
    if on:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        base.gradient_checkpointing_disable()


def random_loader(
    shape: Shape, batches: int, device: str, seed: int, batch_size: int | None = None
) -> DataLoader:
    """Make batches of random tokens and labels in a fixed order, without padding."""
    batch_size = batch_size or shape.batch_size
    generator = torch.Generator().manual_seed(seed)
    texts = batches * batch_size
    tokens = torch.randint(shape.vocabulary, (texts, shape.length), generator=generator)
    labels = torch.randint(shape.classes, (texts,), generator=generator)

    def collate(rows: list[int]) -> BatchEncoding:
        batch = {
            "input_ids": tokens[rows],
            "attention_mask": torch.ones_like(tokens[rows]),
            "labels": labels[rows],
        }
        return BatchEncoding(batch).to(device)

    return DataLoader(
        as_dataset(range(texts)), batch_size=batch_size, collate_fn=collate
    )


@dataclass(frozen=True)
class Jobs:
    """What is done with one model; all but passes and training need a fit before."""

    adapted: AdaptedModel
    batches: DataLoader  # of the fit
    batch: Mapping[str, Tensor]  # to train on, and to predict

    @cached_property
    def la(self) -> LowRankKronLoRALaplace:
        """Return the posterior that `fit` fits."""
        return lowrank_kron(self.adapted)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Return the batch without labels."""
        return {name: each for name, each in self.batch.items() if name != "labels"}

    @torch.no_grad()
    def forward(self) -> None:
        """Compute the model's own logits."""
        self.adapted.logits_model(self.batch)

    def train(self) -> None:
        """Take a step of training."""
        logits_model, labels = self.adapted.logits_model, self.batch["labels"]
        self._step(lambda: cross_entropy(logits_model(self.batch), labels))

    def teach(self) -> None:
        """Take a step on the posterior's probabilities, as `distill` does."""
        with torch.no_grad():
            targets = self.predict_by_learnt()

        def divergence() -> Tensor:
            log_p = self.adapted.logits_model.log_probs(self.inputs)
            # The answers come first, and then what is left to all other tokens.
            of_answers = log_p[:, : targets.shape[-1]]
            return kl_div(of_answers, targets.to(of_answers), reduction="batchmean")

        self._step(divergence)

    def _step(self, loss: Callable[[], Tensor]) -> None:
        """Take a step down a loss; at a rate of 0, all jobs meet the same weights."""
        model = self.adapted.model
        model.train()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.0)
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()

    def fit(self) -> None:
        """Fit the posterior."""
        self.la.fit(self.batches)

    def fit_stock(self, structure: str) -> ParametricLaplace:
        """Fit a posterior of the host's own class."""
        la = stock(self.adapted, structure)
        la.fit(self.batches)
        return la

    def search(self) -> None:
        """Choose the prior precision by labels."""
        self.la.optimize_prior_precision(method="gridsearch", val_loader=self.batches)

    def agree(self) -> None:
        """Choose the prior precision by agreement."""
        self.la.optimize_prior_precision(method="agreement", train_loader=self.batches)

    def predict(self) -> None:
        """Predict by the contrasts that matter."""
        self.la(self.inputs, link_approx=LINK)

    def predict_exactly(self) -> None:
        """Predict by the contrasts of all classes."""
        la = copy(self.la)
        la.n_contrasts = la.n_outputs - 1
        la(self.inputs, link_approx=LINK)

    def amortize(self) -> None:
        """Learn the variances."""
        self.la.amortize(self.batches, unlabelled=None)

    def predict_by_learnt(self) -> Tensor:
        """Predict by learnt variances."""
        predicted = self.la(self.inputs, pred_type="amortized", link_approx=LINK)
        assert isinstance(predicted, Tensor)
        return predicted
