"""What fits and predictions cost on one card, within a number of minutes."""

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from laplace import Laplace
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
)

import laplace_lora_ext
from benchmarks.measuring import reason_of
from benchmarks.models import device_of
from benchmarks.options import Gpu
from benchmarks.random_models import switch_checkpointing
from benchmarks.report import Result, Row, say, table
from benchmarks.training import as_dataset
from laplace_lora_ext import LowRankKronLoRALaplace
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes.recorder import Recorder

GIGABYTE = 1e9
ANSWERS = (11, 12, 13, 14)  # tokens
LORA_B_SCALE = 0.02
RANK = 8
# GB of LoRA training of Llama 2 7B, and with fits of Laplace-LoRA every 1,000 steps, as
# the paper has them in its section "Memory and runtime cost".
PAPER = {"WinoGrande-S": (8.34, 8.43), "BoolQ": (10.48, 10.93)}


@dataclass(frozen=True)
class Cost:
    """What one call of a job takes."""

    seconds: float
    gigabytes: float | None  # at its peak; None on a CPU


@dataclass(frozen=True)
class Shape:
    """The configuration of a model that everybody knows; its weights are random."""

    name: str
    title: str
    config: PreTrainedConfig


def shapes_of(options: Gpu) -> list[Shape]:
    """List the models to measure, in the order asked for."""
    shapes = all_shapes(options.tiny)
    if options.tiny:
        return shapes
    known = {shape.name: shape for shape in shapes}
    return [known[name] for name in options.models]


def all_shapes(tiny: bool) -> list[Shape]:
    """Make the configurations of all models, or of a tiny one alone."""
    common: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if tiny:
        small: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 64,
        }
        return [Shape("tiny", "tiny Llama", LlamaConfig(**small, **common))]
    llama = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        **common,
    )
    qwen = Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        **common,
    )
    return [Shape("llama", "Llama 3 8B", llama), Shape("qwen", "Qwen 2.5 1.5B", qwen)]


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
    for shape in shapes_of(options):
        for setting in settings_of(options):
            if page.is_over:
                break
            page.measure(shape, setting)
        yield page.result()


@dataclass(frozen=True)
class Setting:
    """How a model runs."""

    attention: str
    length: int
    checkpointed: bool
    weights: str = "bfloat16"
    with_rivals: bool = False


def settings_of(options: Gpu) -> list[Setting]:
    """List what is measured of each model, the most telling first."""
    short, long = options.lengths
    settings = [
        Setting("sdpa", short, checkpointed=False),
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
    rivals = Setting("sdpa", short, checkpointed=False, with_rivals=True)
    return [settings[0], rivals, *settings[1:]]


class Page:
    """Rows of figures, gathered until the time is over."""

    def __init__(self, options: Gpu, end: float) -> None:
        self._options = options
        self._device = device_of(options.device)
        self._end = end
        self._exact: list[Row] = []
        self._rows: list[Row] = []
        self._failures: list[str] = []
        self._model: tuple[tuple[str, str, str], PeftModel] | None = None

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

    def measure(self, shape: Shape, setting: Setting) -> None:
        """Add a model's rows in one setting, with as many texts as fit."""
        with self._reporting(f"{shape.title}, {setting}"):
            model = self._model_of(shape, setting)
            switch_checkpointing(model, setting.checkpointed)
            n_examples = self._options.examples
            while not self._measure_jobs(shape, setting, model, n_examples):
                n_examples //= 2

    def _measure_jobs(
        self, shape: Shape, setting: Setting, model: PeftModel, n_examples: int
    ) -> bool:
        """Measure each job; return whether a step of training had room in memory."""
        place: Row = {
            "model": shape.title,
            "weights": setting.weights,
            "attention": setting.attention,
            "tokens": setting.length,
            "texts": n_examples,
            "checkpointed": "yes" if setting.checkpointed else "no",
        }
        batches = random_batches(
            n_examples,
            self._options.batches,
            setting.length,
            shape.config.vocab_size,
            self._device,
        )
        jobs = Jobs(model, batches)
        names = Jobs.RIVALS if setting.with_rivals else Jobs.OURS
        for name in names:
            # Within a setting too: a job of a large model may take a minute.
            if self.is_over:
                break
            where = [str(value) for value in place.values()]
            with self._reporting(", ".join([*where, name])):
                try:
                    figures = self._cost(lambda name=name: jobs.run(name))
                except torch.cuda.OutOfMemoryError:
                    # Fewer texts are tried until they can be trained on. Another job
                    # that these leave no room for has failed.
                    if name == "training step" and n_examples > 1:
                        return False
                    raise
                row = {
                    **place,
                    "job": name,
                    "seconds": figures.seconds / jobs.texts(name),
                }
                self._rows.append({**row, "gigabytes": figures.gigabytes})
                say(self._options, *self._rows[-1].values())
        return True

    def _cost(self, job: Callable[[], object]) -> Cost:
        """Time the second call of a job, and take the peak of both.

        What is loaded and chosen during the first one counts for no job.
        """
        on_cuda = torch.device(self._device).type == "cuda"
        gc.collect()
        if on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        job()
        started = self._now()
        job()
        seconds = self._now() - started
        peak = torch.cuda.max_memory_allocated() / GIGABYTE if on_cuda else None
        return Cost(seconds, peak)

    def _now(self) -> float:
        if torch.device(self._device).type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _model_of(self, shape: Shape, setting: Setting) -> PeftModel:
        wanted = shape.title, setting.attention, setting.weights
        if self._model is None or self._model[0] != wanted:
            self._model = None  # before the next one is made
            gc.collect()
            model = random_model(
                shape.config,
                setting.attention,
                self._options.dtype,
                self._device,
                in_4_bits=setting.weights == "4 bits",
            )
            self._model = wanted, model
        return self._model[1]

    @contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Note an error, and go on."""
        try:
            yield
        except Exception as error:
            self._failures.append(f"{what}: {reason_of(error)}")
            say(self._options, self._failures[-1])


class Jobs:
    """What is measured of one model, each on the same batches."""

    OURS = (
        "training step",
        "fit",
        "exact prediction",
        "agreement",
        "amortize",
        "amortized prediction",
        "student's step",
    )
    RIVALS = ("stock diag, fit", "stock Kron, fit")

    def __init__(self, model: PeftModel, batches: list[dict[str, Tensor]]) -> None:
        self._model = model
        self._batches = batches
        self._inputs = {
            key: value for key, value in batches[0].items() if key != "labels"
        }
        self._weights = [
            weight for name, weight in model.named_parameters() if ".lora_" in name
        ]
        self._fitted: LowRankKronLoRALaplace | None = None

    @property
    def _la(self) -> LowRankKronLoRALaplace:
        """Return the posterior that the job "fit" has left."""
        assert self._fitted is not None
        return self._fitted

    def texts(self, name: str) -> int:
        """Tell how many texts a job handles."""
        size = len(self._inputs["input_ids"])
        if "step" in name:
            return 1
        return size if "prediction" in name else size * len(self._batches)

    def run(self, name: str) -> None:
        """Do a job; those after a fit need it done."""
        if name == "training step":
            self._train()
        elif name == "fit":
            self._fitted = laplace_lora_ext.Laplace(
                self._model, "classification", class_token_ids=list(ANSWERS)
            )
            self._fitted.fit(self._batches)
        elif name == "exact prediction":
            self._la(self._inputs, link_approx="mean_field")
        elif name == "agreement":
            self._la.optimize_prior_precision(
                method="agreement", train_loader=self._batches
            )
        elif name == "amortize":
            self._la.amortize(self._batches, unlabelled=None)
        elif name == "amortized prediction":
            self._la(self._inputs, pred_type="amortized", link_approx="mean_field")
        elif name == "student's step":
            self._teach()
        else:
            self._fit_stock("diag" if "diag" in name else "kron")

    def _train(self) -> None:
        self._model.train()
        # At a rate of 0 all jobs meet the same weights.
        optimizer = torch.optim.AdamW(self._weights, lr=0.0)
        logits = LogitsModel(self._model, ANSWERS)(self._batches[0])
        nn.functional.cross_entropy(logits, self._batches[0]["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        self._model.eval()

    def _teach(self) -> None:
        """Take a step on the posterior's probabilities, as `distill` does."""
        with torch.no_grad():
            targets = self._la(
                self._inputs, pred_type="amortized", link_approx="mean_field"
            )
        assert isinstance(targets, Tensor)
        self._model.train()
        optimizer = torch.optim.AdamW(self._weights, lr=0.0)
        log_p = LogitsModel(self._model, ANSWERS).log_probs(self._inputs)
        # The answers come first, and then what is left to all other tokens.
        of_answers = log_p[:, : len(ANSWERS)]
        divergence = nn.functional.kl_div(
            of_answers, targets.to(of_answers), reduction="batchmean"
        )
        divergence.backward()
        optimizer.step()
        optimizer.zero_grad()
        self._model.eval()

    def _fit_stock(self, structure: str) -> None:
        wrapped = LogitsModel(self._model, ANSWERS)
        la = Laplace(wrapped, "classification", "all", structure)
        # Each element is a batch already.
        la.fit(DataLoader(as_dataset(self._batches), batch_size=None))


def exactness(
    attention: str, dtype: str, checkpointed: bool, device: str
) -> dict[str, float]:
    """Find the largest relative difference from row-by-row autograd."""
    # RMSNorm of Llama casts to float32: GPT-2 computes in the precision of its weights.
    from transformers import GPT2Config

    config = GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=2,
        vocab_size=64,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = random_model(config, attention, dtype, device, ["c_attn", "c_proj"])
    switch_checkpointing(model, checkpointed)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (3, 12), generator=generator)
    mask = torch.ones_like(tokens)
    # Padded on the left, as prompts are.
    mask[0, :4] = 0
    batch = {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}
    wrapped = LogitsModel(model, ANSWERS)
    blocks = find_blocks(model)
    Js, _ = Recorder(wrapped, blocks).jacobians(batch)
    expected = by_rows(wrapped, [block.weight for block in blocks], batch)
    figures = {"jacobians": relative(Js, expected)}

    la = laplace_lora_ext.Laplace(
        model,
        "classification",
        class_token_ids=list(ANSWERS),
        # More than any factor has: nothing is left out.
        backend_kwargs={"rank": 1000},
    )
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


def random_model(
    config: PreTrainedConfig,
    attention: str,
    dtype: str,
    device: str,
    target_modules: Sequence[str] = ("q_proj", "v_proj"),
    in_4_bits: bool = False,
) -> PeftModel:
    """Make a model with random weights on the device, LoRA's among them."""
    torch.manual_seed(0)
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention
        )
    if in_4_bits:
        quantize(base)
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=RANK, target_modules=list(target_modules)
    )
    model = get_peft_model(base, lora, autocast_adapter_dtype=dtype != "float64")
    # PEFT starts lora_B at zero, where the curvature of lora_A is zero too.
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=LORA_B_SCALE)
    model.config.use_cache = False
    return model.eval()


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


def random_batches(
    n_examples: int, n_batches: int, length: int, vocabulary: int, device: str
) -> list[dict[str, Tensor]]:
    """Make batches of random tokens on the device, all of one length."""
    # On the CPU: the same tokens for every device.
    generator = torch.Generator().manual_seed(0)
    shape = (n_examples, length)
    batches = []
    for _ in range(n_batches):
        # From 1 on: 0 is padding.
        tokens = torch.randint(1, vocabulary, shape, generator=generator)
        labels = torch.randint(len(ANSWERS), (n_examples,), generator=generator)
        batches.append(
            {
                "input_ids": tokens.to(device),
                "attention_mask": torch.ones_like(tokens, device=device),
                "labels": labels.to(device),
            }
        )
    return batches
