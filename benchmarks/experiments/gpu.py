"""What fits and predictions cost on one card, within a number of minutes."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import groupby, product
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig, Qwen2Config

from benchmarks.measuring import (
    megabytes_in_use,
    reason_of,
    repeated_seconds,
    time_and_memory,
)
from benchmarks.methods.posteriors import lowrank_kron
from benchmarks.models import AdaptedModel, device_of
from benchmarks.options import Gpu
from benchmarks.random_models import (
    Jobs,
    Shape,
    random_base,
    random_loader,
    switch_checkpointing,
    with_random_lora,
)
from benchmarks.report import Result, Row, say, table
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes.recorder import Recorder

MEGABYTES_PER_GIGABYTE = 1e3
ANSWERS = [0, 1, 2, 3]  # tokens
RANK = 8
TRAINING = "training step"
# GB of LoRA training of Llama 2 7B, and with fits of Laplace-LoRA every 1,000 steps, as
# the paper has them in its section "Memory and runtime cost".
PAPER = {"WinoGrande-S": (8.34, 8.43), "BoolQ": (10.48, 10.93)}
# Models that everybody knows, by the options' names.
SHAPES = {
    "llama": Shape(4096, 32, 14336, heads=32, key_value_heads=8, vocabulary=128256),
    "qwen": Shape(
        1536,
        28,
        8960,
        heads=12,
        key_value_heads=2,
        vocabulary=151936,
        kind=Qwen2Config,
        ties_embeddings=True,
    ),
    "tiny": Shape(32, 2, 48, key_value_heads=2, vocabulary=64),
}
TITLES = {"llama": "Llama 3 8B", "qwen": "Qwen 2.5 1.5B", "tiny": "tiny Llama"}


def attentions() -> list[str]:
    """List the attention implementations that this machine has."""
    available = ["sdpa", "eager"]
    if find_spec("flash_attn") is not None:
        available.append("flash_attention_2")
    return available


def run(options: Gpu) -> Iterator[Result]:
    """Check exactness on the device, then measure until the minutes are over."""
    warnings.filterwarnings("ignore")
    page = Page(options, time.monotonic() + 60 * options.minutes)
    page.check_exactness()
    yield page.result()
    for name in ("tiny",) if options.tiny else options.models:
        # Settings of one model stand together, of which one at a time is in memory.
        for _, settings in groupby(settings_of(options), lambda each: each.of_model):
            page.measure(name, list(settings))
        yield page.result()


@dataclass(frozen=True)
class Setting:
    """How a model runs."""

    attention: str
    length: int
    checkpointed: bool
    weights: str = "bfloat16"
    with_rivals: bool = False

    @property
    def of_model(self) -> tuple[str, str]:
        """Return what settings of one model share."""
        return self.attention, self.weights


def settings_of(options: Gpu) -> list[Setting]:
    """List what is measured of each model, the most telling first."""
    short, long = options.lengths
    settings = [
        Setting("sdpa", short, checkpointed=False),
        Setting("sdpa", short, checkpointed=False, with_rivals=True),
        Setting("sdpa", long, checkpointed=True),
        Setting("sdpa", long, checkpointed=False),
        Setting("sdpa", short, checkpointed=True),
    ]
    if find_spec("bitsandbytes") is not None:
        settings += [
            Setting("sdpa", short, checkpointed=False, weights="4 bits"),
            Setting("sdpa", long, checkpointed=True, weights="4 bits"),
        ]
    settings += [
        Setting(name, short, checkpointed=False)
        for name in attentions()
        if name != "sdpa"
    ]
    return settings


class Page:
    """Rows of figures, gathered until the time is over."""

    def __init__(self, options: Gpu, end: float) -> None:
        self._options = options
        self._device = device_of(options.device)
        self._end = end
        self._exact: list[Row] = []
        self._rows: list[Row] = []
        self._failures: list[str] = []

    @property
    def is_over(self) -> bool:
        """Tell whether the minutes are over."""
        return time.monotonic() > self._end

    def result(self) -> Result:
        """Collect all figures so far, and make the page that shows them."""
        paper = ", ".join(
            f"{task} {lora} and {both}" for task, (lora, both) in PAPER.items()
        )
        parts = [
            "Random weights in the shapes of known models: they tell about shapes and "
            f"speed only. {len(ANSWERS)} answers' tokens, LoRA of rank {RANK} in "
            f"query and value, weights in {self._options.dtype}, "
            f"{self._options.examples} texts of equal length in a batch. GB are peaks "
            "of PyTorch's allocator, weights included; seconds are for one text, but "
            "for a step of training, which is one of a batch. The paper's 7B model "
            f"took, in GB without and with Laplace-LoRA: {paper}.",
            "Largest difference from an independent computation on the same device, "
            "relative to the largest number:",
            table(self._exact),
            table(self._rows) if self._rows else "",
        ]
        if self._failures:
            parts.append("\n".join(f"- {failure}" for failure in self._failures))
        figures = {
            "exactness": self._exact,
            "rows": self._rows,
            "failures": self._failures,
        }
        return figures, parts

    # --- exactness --------------------------------------------------------------------

    def check_exactness(self) -> None:
        """Compare Jacobians and evidence with row-by-row autograd.

        Each attention and dtype has a row.
        """
        for attention, dtype, checkpointed in product(
            attentions(), ("float64", "float32", "bfloat16"), (False, True)
        ):
            row: Row = {
                "attention": attention,
                "dtype": dtype,
                "checkpointed": checkpointed,
            }
            with self._reporting(f"exactness, {attention}, {dtype}"):
                self._exact.append(
                    row | exactness(attention, dtype, checkpointed, self._device)
                )
                say(self._options, *self._exact[-1].values())

    # --- costs ------------------------------------------------------------------------

    def measure(self, name: str, settings: Sequence[Setting]) -> None:
        """Add a model's rows in some settings, with as many texts as fit."""
        if self.is_over:
            return
        attention, weights = settings[0].of_model
        shape = SHAPES[name]
        with self._reporting(f"{TITLES[name]}, {attention}, {weights}"):
            adapted = random_model(
                shape.config,
                attention,
                self._options.dtype,
                self._device,
                shape.target_modules,
                in_4_bits=weights == "4 bits",
            )
            for setting in settings:
                switch_checkpointing(adapted.model, setting.checkpointed)
                texts = replace(
                    shape, length=setting.length, batch_size=self._options.examples
                )
                while not self._measure_jobs(TITLES[name], setting, adapted, texts):
                    texts = replace(texts, batch_size=texts.batch_size // 2)

    def _measure_jobs(
        self, title: str, setting: Setting, adapted: AdaptedModel, texts: Shape
    ) -> bool:
        """Measure each job; return whether a step of training had room in memory."""
        place: Row = {
            "model": title,
            "weights": setting.weights,
            "attention": setting.attention,
            "tokens": texts.length,
            "texts": texts.batch_size,
            "checkpointed": "yes" if setting.checkpointed else "no",
        }
        loader = random_loader(texts, self._options.batches, self._device, seed=0)
        jobs = Jobs(adapted, loader, next(iter(loader)))
        listed = rivals_of(jobs) if setting.with_rivals else jobs_of(jobs)
        for name, job in listed.items():
            # Within a setting too: a job of a large model may take a minute.
            if self.is_over:
                break
            where = [str(value) for value in place.values()]
            with self._reporting(", ".join([*where, name])):
                try:
                    seconds, gigabytes = self._cost(job)
                except torch.cuda.OutOfMemoryError:
                    # Fewer texts are tried until they can be trained on. Another job
                    # that these leave no room for has failed.
                    if name == TRAINING and texts.batch_size > 1:
                        return False
                    raise
                seconds /= n_texts(name, texts.batch_size, len(loader))
                row = {**place, "job": name, "seconds": seconds}
                self._rows.append({**row, "gigabytes": gigabytes})
                say(self._options, *self._rows[-1].values())
        return True

    def _cost(self, job: Callable[[], object]) -> tuple[float, float | None]:
        """Time the second call of a job; of the first take the peak, on a card.

        What is loaded and chosen during the first one counts for no time.
        """
        if torch.device(self._device).type != "cuda":
            return repeated_seconds(job, repetitions=1).minimum, None
        before = megabytes_in_use(self._device)
        figures = time_and_memory(job, self._device, repetitions=1, limit=inf)
        gigabytes = (before + figures["peak_megabytes"]) / MEGABYTES_PER_GIGABYTE
        return figures["median"], gigabytes

    @contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Note an error, and go on."""
        try:
            yield
        except Exception as error:
            self._failures.append(f"{what}: {reason_of(error)}")
            say(self._options, self._failures[-1])


def jobs_of(jobs: Jobs) -> dict[str, Callable[[], object]]:
    """Name what is measured of every model; jobs after a fit need it done."""
    return {
        TRAINING: jobs.train,
        "fit": jobs.fit,
        "exact prediction": jobs.predict,
        "agreement": jobs.agree,
        "amortize": jobs.amortize,
        "amortized prediction": jobs.predict_by_learnt,
        "student's step": jobs.teach,
    }


def rivals_of(jobs: Jobs) -> dict[str, Callable[[], object]]:
    """Name what is measured of the host's own classes."""
    return {
        "stock diag, fit": partial(jobs.fit_stock, "diag"),
        "stock Kron, fit": partial(jobs.fit_stock, "kron"),
    }


def n_texts(job: str, batch_size: int, n_batches: int) -> int:
    """Tell by how many texts a job's seconds are divided."""
    if "step" in job:
        return 1
    return batch_size if "prediction" in job else batch_size * n_batches


def random_model(
    config: PreTrainedConfig,
    attention: str,
    dtype: str,
    device: str,
    target_modules: Sequence[str],
    in_4_bits: bool = False,
) -> AdaptedModel:
    """Make a model with random weights on the device, LoRA's among them."""
    base = random_base(
        AutoModelForCausalLM, config, dtype, device, 0, attn_implementation=attention
    )
    if in_4_bits:
        quantize(base)
    model = with_random_lora(
        base,
        "CAUSAL_LM",
        target_modules,
        RANK,
        autocast_adapter_dtype=dtype != "float64",
    )
    return AdaptedModel(model, ANSWERS)


def exactness(
    attention: str, dtype: str, checkpointed: bool, device: str
) -> dict[str, float]:
    """Find the largest relative difference from row-by-row autograd."""
    # RMSNorm of Llama casts to float32: GPT-2 computes in the precision of its weights.
    config = GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=2,
        vocab_size=64,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    adapted = random_model(config, attention, dtype, device, ["c_attn", "c_proj"])
    model = adapted.model
    switch_checkpointing(model, checkpointed)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (3, 12), generator=generator)
    mask = torch.ones_like(tokens)
    # Padded on the left, as prompts are.
    mask[0, :4] = 0
    batch = {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}
    wrapped = adapted.logits_model
    blocks = find_blocks(model)
    Js, _ = Recorder(wrapped, blocks).jacobians(batch)
    expected = by_rows(wrapped, [block.weight for block in blocks], batch)
    figures = {"jacobians": relative(Js, expected)}

    # The rank is more than any factor has: nothing is left out.
    la = lowrank_kron(adapted, backend_kwargs={"rank": 1000})
    labels = torch.tensor([0, 1, 2], device=device)
    la.fit([{**batch, "labels": labels}])
    _, f_var = la.predictive_moments(batch)
    # The prior precision is 1.
    prior = torch.eye(la.n_params, device=device).double()
    H = la.H.to_matrix().double() + prior
    wide = expected.double()
    solved = torch.linalg.solve(H, wide.flatten(0, 1).mT)
    covariance = torch.einsum("bcp,bdp->bcd", wide, solved.mT.view_as(wide))
    figures["covariance"] = relative(f_var, covariance)
    squared_norm = la.mean.double().square().sum()
    evidence = la.log_likelihood.double() - (squared_norm + H.logdet()) / 2
    figures["evidence"] = relative(la.log_marginal_likelihood(), evidence)
    return figures


def by_rows(model: LogitsModel, weights: list[Tensor], batch: Any) -> Tensor:
    """Compute Jacobians `(B, C, parameters)`, by a backward pass for each logit."""
    for weight in weights:
        weight.requires_grad_(True)
    logits = model(batch)
    rows = []
    for logit in logits.flatten():
        # All logits share one graph.
        gradients = torch.autograd.grad(logit, weights, retain_graph=True)
        row = torch.cat([gradient.flatten() for gradient in gradients])
        rows.append(row)
    return torch.stack(rows).view(*logits.shape, -1)


def relative(found: Tensor, expected: Tensor) -> float:
    """Compute the largest difference, relative to the largest number."""
    found = found.detach().double()
    expected = expected.detach().double()
    largest_difference = (found - expected).abs().max()
    return (largest_difference / expected.abs().max()).item()


def quantize(model: nn.Module) -> None:
    """Quantize linear layers to NF4, except the output layer."""
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    setattr(model, "is_loaded_in_4bit", True)  # noqa: B010 - PEFT asks for it
    named = [
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear
    ]
    for name, layer in named:
        if name == "lm_head":
            continue
        parent, _, own_name = name.rpartition(".")
        quantized = Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=layer.weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        # Type checkers take it for a plain parameter, which has no such setting.
        settings: dict[str, Any] = {"requires_grad": False, "quant_type": "nf4"}
        weight: Any = Params4bit(layer.weight.data.cpu(), **settings)
        quantized.weight = weight.to(layer.weight.device)  # quantizes on the way
        quantized.bias = layer.bias
        setattr(model.get_submodule(parent), own_name, quantized)
