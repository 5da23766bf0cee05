"""What one text costs: requests one after the other, in forward passes of the model."""

import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

from benchmarks.measuring import processor_clock, seconds_of
from benchmarks.methods.posteriors import LINK, lowrank_kron
from benchmarks.models import AdaptedModel, device_of, encoder_folder
from benchmarks.options import Request
from benchmarks.random_models import LORA_B_SCALE
from benchmarks.report import Result, Row, say, table
from laplace_lora_ext import LowRankKronLoRALaplace
from laplace_lora_ext.models.adapters import find_peft_model
from laplace_lora_ext.predictive.moments import Contrasts

BARE = "the model's own forward pass"
EPOCH = "an epoch of training"
FIT = "a fit to its texts"
WIDTH, LAYERS = 16, 32  # of the thin Llama
NO_VARIANCE = 1e12  # a prior precision
DRAWS = 10
WARM_UP = 5
FITS = 10  # and as many epochs

Batch = Mapping[str, Tensor]


def run(options: Request) -> Iterator[Result]:
    """Measure each model."""
    rows: list[Row] = []
    device = device_of(options.device)
    for name, model in models(options, device):
        say(options, name)
        rows += [{"model": name, **row} for row in measured(model, options, device)]
    yield {"rows": rows}, text_of(rows, options)


def models(options: Request, device: str) -> Iterator[tuple[str, AdaptedModel]]:
    """Yield the encoder with each number of classes, and a thin, deep Llama."""
    torch.manual_seed(options.seed)
    for classes in options.classes:
        base = AutoModelForSequenceClassification.from_pretrained(
            encoder_folder(), num_labels=classes
        )
        adapted = _with_lora(base, ["query", "value"], device)
        yield f"MiniLM, {classes} classes", adapted
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        vocab_size=1000,
        pad_token_id=0,
    )
    config.num_labels = min(options.classes)
    base = LlamaForSequenceClassification(config)
    yield f"{LAYERS} layers of width {WIDTH}", _with_lora(base, "all-linear", device)


def _with_lora(
    base: PreTrainedModel, target_modules: list[str] | str, device: str
) -> AdaptedModel:
    """Add random LoRA, whose price is that of trained one."""
    lora = LoraConfig(task_type="SEQ_CLS", r=8, target_modules=target_modules)
    model = get_peft_model(base, lora)
    assert isinstance(model, PeftModel)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=LORA_B_SCALE)
    return AdaptedModel(model.eval().to(device))


@dataclass(frozen=True)
class Requests:
    """One text, and the ways to predict it."""

    la: LowRankKronLoRALaplace
    without_variance: LowRankKronLoRALaplace
    model: nn.Module
    text: Batch

    def forward(self) -> Any:
        """Run the model alone."""
        with torch.no_grad():
            return self.model(**self.text)

    @cached_property
    def layers(self) -> list[nn.Module]:
        """List the layers that passes go back to; a walk through all is no pass."""
        named = self.model.named_modules()
        return [layer for name, layer in named if name.endswith(".lora_A.default")]

    def exact(self) -> Any:
        """Predict with exact variances."""
        return self.la(self.text, link_approx=LINK)

    def passes(self) -> Any:
        """Make the passes of an exact prediction, and nothing of what they give."""
        hooks = [layer.register_forward_hook(_anchored) for layer in self.layers]
        logits = self.model(**self.text).logits
        vectors = Contrasts().directions(logits.detach())
        torch.autograd.grad(logits, _ANCHOR, vectors, is_grads_batched=True)
        for hook in hooks:
            hook.remove()

    def learnt(self) -> Any:
        """Predict with learnt variances."""
        return self.la(self.text, pred_type="amortized", link_approx=LINK)

    def scaled(self) -> Any:
        """Predict without variance, as a temperature does."""
        return self.without_variance(self.text, link_approx=LINK)

    def drawn(self) -> Any:
        """Predict by draws of the weights."""
        return self.la(self.text, pred_type="nn", link_approx="mc", n_samples=DRAWS)


_ANCHOR = torch.zeros((), requires_grad=True)


def _anchored(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output + _ANCHOR.to(output)


def _fitted(
    model: AdaptedModel, batch: Batch, prior_precision: float
) -> LowRankKronLoRALaplace:
    la = lowrank_kron(model)
    with warnings.catch_warnings():
        # Labels are as random as weights.
        warnings.filterwarnings("ignore", "The trained model is no better")
        la.fit([batch])
    la.prior_precision = prior_precision
    return la


def measured(model: AdaptedModel, options: Request, device: str) -> list[Row]:
    """Fit to a few random texts; measure medians of requests, and of trainings."""
    base = model.model
    config: Any = find_peft_model(base).get_base_model().config
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.texts, options.length)
    batch = {
        "input_ids": torch.randint(5, config.vocab_size, shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "labels": torch.arange(options.texts) % config.num_labels,
    }
    batch = {name: values.to(device) for name, values in batch.items()}
    text = {name: rows[:1] for name, rows in batch.items() if name != "labels"}
    la = _fitted(model, batch, 1.0)
    la.amortize([batch])
    requests = Requests(la, _fitted(model, batch, NO_VARIANCE), base, text)
    kinds: dict[str, Callable[[], Any]] = {
        BARE: requests.forward,
        "passes of an exact prediction": requests.passes,
        "exact": requests.exact,
        "learnt variance": requests.learnt,
        "without variance": requests.scaled,
        f"{DRAWS} draws of the weights": requests.drawn,
    }
    clock = processor_clock(device)
    rows: list[Row] = []
    for kind, request in kinds.items():
        # In turn with the model itself: what ran before is the same in each kind.
        seconds = [
            (seconds_of(requests.forward, clock), seconds_of(request, clock))
            for _ in range(WARM_UP + options.requests)
        ]
        forward, taken = map(statistics.median, zip(*seconds[WARM_UP:], strict=True))
        rows.append({"request": kind, "ms": 1000 * taken, "forwards": taken / forward})
    training: dict[str, list[float]] = {EPOCH: [], FIT: []}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The trained model is no better")
        for _ in range(FITS):
            training[EPOCH].append(_train(base, batch, clock))
            training[FIT].append(seconds_of(partial(la.fit, [batch]), clock))
    epoch, fit = map(statistics.median, training.values())
    rows.append({"request": EPOCH, "ms": 1000 * epoch, "epochs": 1.0})
    rows.append({"request": FIT, "ms": 1000 * fit, "epochs": fit / epoch})
    return rows


def _train(model: nn.Module, batch: Batch, clock: Callable[[], float]) -> float:
    """Measure the seconds of a training step, which leaves the weights as they are."""
    texts = {name: values for name, values in batch.items() if name != "labels"}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)

    def step() -> None:
        logits = model(**texts).logits
        cross_entropy(logits, batch["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    model.train()
    taken = seconds_of(step, clock)
    model.eval()
    return taken


def text_of(rows: list[Row], options: Request) -> list[str]:
    """Put the figures in words and a table."""
    return [
        f"One text of {options.length} tokens a request; medians of {options.requests} "
        "requests, each in turn with a forward pass, in processor time. The weights of "
        "LoRA and head are random: they tell about speed only. An epoch is a forward "
        f"and a backward pass of one batch of {options.texts} texts, and a step of "
        "AdamW; a fit has its default draws.",
        table(rows, ["model", "request", "ms", "forwards", "epochs"]),
    ]
