"""What one text costs: requests one after the other, in forward passes of the model."""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from benchmarks.measuring import processor_clock, seconds_of
from benchmarks.methods.posteriors import LINK
from benchmarks.models import AdaptedModel, device_of, encoder_folder
from benchmarks.options import Request
from benchmarks.random_models import (
    Jobs,
    Shape,
    random_classifier,
    random_loader,
    with_random_lora,
)
from benchmarks.report import Result, Row, say, table
from laplace_lora_ext import LowRankKronLoRALaplace
from laplace_lora_ext.predictive.moments import Contrasts

BARE = "the model's own forward pass"
LEARNT = "learnt variance"
EPOCH = "an epoch of training"
FIT = "a fit to its texts"
WIDTH, LAYERS = 16, 32  # of the thin Llama
NO_VARIANCE = 1e12  # a prior precision
DRAWS = 10
WARM_UP = 5
FITS = 10  # and as many epochs


def run(options: Request) -> Iterator[Result]:
    """Measure each model."""
    rows: list[Row] = []
    device = device_of(options.device)
    for name, shape, adapted in models(options, device):
        say(options, name)
        of_model = measured(adapted, shape, options, device)
        rows += [{"model": name, **row} for row in of_model]
    yield {"rows": rows}, text_of(rows, options)


def models(options: Request, device: str) -> Iterator[tuple[str, Shape, AdaptedModel]]:
    """Yield the encoder with each number of classes, and a thin, deep Llama."""
    thin = Shape(
        hidden_size=WIDTH,
        layers=LAYERS,
        intermediate_size=2 * WIDTH,
        heads=2,
        target_modules="all-linear",
        classes=min(options.classes),
        batch_size=options.texts,
        length=options.length,
    )
    torch.manual_seed(options.seed)
    for classes in options.classes:
        base = AutoModelForSequenceClassification.from_pretrained(
            encoder_folder(), num_labels=classes
        )
        model = with_random_lora(base.to(device), "SEQ_CLS", ["query", "value"], 8)
        texts = replace(thin, vocabulary=base.config.vocab_size, classes=classes)
        yield f"MiniLM, {classes} classes", texts, AdaptedModel(model)
    adapted = random_classifier(thin, device, options.seed)
    yield f"{LAYERS} layers of width {WIDTH}", thin, adapted


@dataclass(frozen=True)
class Requests:
    """One text, and the ways to predict it."""

    la: LowRankKronLoRALaplace
    model: nn.Module
    text: dict[str, Tensor]

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
        return self._without_variance(self.text, link_approx=LINK)

    @cached_property
    def _without_variance(self) -> LowRankKronLoRALaplace:
        la = copy(self.la)
        la.prior_precision = la.prior_precision.new_full((1,), NO_VARIANCE)
        return la

    def drawn(self) -> Any:
        """Predict by draws of the weights."""
        return self.la(self.text, pred_type="nn", link_approx="mc", n_samples=DRAWS)


_ANCHOR = torch.zeros((), requires_grad=True)


def _anchored(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output + _ANCHOR.to(output)


def measured(
    adapted: AdaptedModel, shape: Shape, options: Request, device: str
) -> list[Row]:
    """Fit to a few random texts; measure medians of requests, and of trainings."""
    (batch,) = loader = random_loader(shape, 1, device, options.seed)
    jobs = Jobs(adapted, loader, batch)
    with warnings.catch_warnings():
        # Labels are as random as weights.
        warnings.filterwarnings("ignore", "The trained model is no better")
        return _measured(jobs, options, processor_clock(device))


def _measured(jobs: Jobs, options: Request, clock: Callable[[], float]) -> list[Row]:
    jobs.fit()
    jobs.amortize()
    text = {name: values[:1] for name, values in jobs.inputs.items()}
    requests = Requests(jobs.la, jobs.adapted.model, text)
    kinds: dict[str, Callable[[], Any]] = {
        BARE: requests.forward,
        "passes of an exact prediction": requests.passes,
        "exact": requests.exact,
        LEARNT: requests.learnt,
        "without variance": requests.scaled,
        f"{DRAWS} draws of the weights": requests.drawn,
    }
    rows: list[Row] = []
    for kind, request in kinds.items():
        # In turn with the model itself: what ran before is the same in each kind.
        seconds = [
            (seconds_of(requests.forward, clock), seconds_of(request, clock))
            for _ in range(WARM_UP + options.requests)
        ]
        forward, taken = map(statistics.median, zip(*seconds[WARM_UP:], strict=True))
        rows.append({"request": kind, "ms": 1000 * taken, "forwards": taken / forward})
    rows += [
        {"request": kind, **throughput(kinds[kind], options)} for kind in (BARE, LEARNT)
    ]
    seconds = [
        (seconds_of(jobs.train, clock), seconds_of(jobs.fit, clock))
        for _ in range(FITS)
    ]
    epoch, fit = map(statistics.median, zip(*seconds, strict=True))
    rows.append({"request": EPOCH, "ms": 1000 * epoch, "epochs": 1.0})
    rows.append({"request": FIT, "ms": 1000 * fit, "epochs": fit / epoch})
    return rows


def throughput(request: Callable[[], Any], options: Request) -> Row:
    """Return how many requests a second several threads finish, beside one."""
    rates = [_rate(request, n, options.requests) for n in (1, options.workers)]
    return {"workers": options.workers, "throughput": rates[1] / rates[0]}


def _rate(request: Callable[[], Any], n_threads: int, n_requests: int) -> float:
    def answer(_: int) -> None:
        request()

    # A new thread has as many threads of OpenMP as there are cores.
    one_core = partial(torch.set_num_threads, 1)
    with ThreadPoolExecutor(n_threads, initializer=one_core) as pool:
        list(pool.map(answer, range(n_threads)))
        start = time.perf_counter()
        list(pool.map(answer, range(n_requests)))
        return n_requests / (time.perf_counter() - start)


def text_of(rows: list[Row], options: Request) -> list[str]:
    """Put the figures in words and a table."""
    return [
        f"One text of {options.length} tokens a request; medians of {options.requests} "
        "requests, each in turn with a forward pass, in processor time. The weights of "
        "LoRA and head are random: they tell about speed only. An epoch is a forward "
        f"and a backward pass of one batch of {options.texts} texts, and a step of "
        "AdamW; a fit has its default draws. Throughput is that of "
        f"{options.workers} threads, each on one core, in that of one.",
        table(rows, ["model", "request", "ms", "forwards", "epochs", "throughput"]),
    ]
