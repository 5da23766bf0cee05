"""Pages that each build of the site makes anew, from the repository as it is.

Documents that live elsewhere in the repository keep their paths, and so their links.
The reference has every public name, on a page for each task of a reader; guides get the
options of commands, and the page of errors every message of the package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import laplace_lora_ext as package
from laplace_lora_cli import COMMANDS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / package.__name__
SHARED = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "examples/*.ipynb",
    "benchmarks/README.md",
    "benchmarks/results/*",
    "benchmarks/figures/*",
)
MESSAGES = "<!-- messages -->"
# What a reader was doing, and the folders and files whose messages he then sees.
MOMENTS = {
    "When a model is given": ("models", "tasks", "laplace", "curvature", "messages"),
    "In a fit": ("passes", "fit", "processes"),
    "When the prior is chosen": ("tuning",),
    "In a prediction": ("predictive", "predicting", "metrics", "plots"),
    "In a training": ("training",),
    "When posteriors are saved, loaded or joined": ("saving", "mixture", "merging"),
    "On the command line": ("commands",),
}
ELSEWHERE = "In other calls"
OPTIONS = re.compile("<!-- options: (.+) -->")
# What a reader wants to do, in one sentence, and what does it.
REFERENCE = {
    "fit": (
        "Fit a posterior to a trained model, or train one in stages.",
        "LoRALaplace",
        "Laplace",
        "train_in_stages",
        "in_stages",
        "LaplaceMixture",
        "DataCollatorForChoices",
    ),
    "choose": (
        "Choose the prior precision: each name of `method=` is also an object.",
        "GridSearch",
        "SecondTraining",
        "Agreement",
        "Marglik",
        "ValGD",
        "TokenGridSearch",
        "TuningHistory",
    ),
    "predict": (
        "Predict, with what a decision needs. `la.predict` returns most of these.",
        "Predictor",
        "Prediction",
        "Review",
        "predictive.predictions.Proof",
        "NumberPrediction",
        "TextScores",
        "Moments",
        "PredictiveStatistics",
    ),
    "serve": (
        "Load a posterior, and predict by one forward pass. Students and drawn "
        "adapters are methods of [`Predictor`](predict.md).",
        "from_pretrained",
        "LearntVariance",
        "merge",
    ),
    "measure": (
        "Measure how well probabilities are calibrated, and draw it.",
        "metrics",
        "plots",
    ),
    "extend": (
        "Build on the classes behind the factory.",
        "LowRankKronLoRALaplace",
        "PAPER_SETTINGS",
    ),
}


# Before other plugins look, of which mkdocs-jupyter turns notebooks into pages.
@event_priority(100)
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add documents from the rest of the repository, and the reference."""
    for pattern in SHARED:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            # Files of a folder, not "generated" ones: mkdocs-jupyter asks where a
            # notebook is.
            files.append(
                File(name, str(ROOT), config.site_dir, config.use_directory_urls)
            )
    for task in REFERENCE:
        content = reference(task)
        files.append(File.generated(config, f"reference/{task}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put in what a page asks for, and mend links.

    Guides stand in the site's own folder: links to them lose `docs/`, and theirs to
    the rest of the repository lose `../`.
    """
    markdown = markdown.replace("](docs/", "](")
    if "/" not in page.file.src_uri:
        markdown = markdown.replace("](../", "](")
    markdown = OPTIONS.sub(lambda found: options(found[1]), markdown)
    if MESSAGES not in markdown:
        return markdown
    return markdown.replace(MESSAGES, "\n".join(messages()))


def reference(task: str) -> str:
    """What does one task, in the order of `REFERENCE`."""
    what, *names = REFERENCE[task]
    entries = [f"::: {package.__name__}.{name}" for name in names]
    return "\n\n".join([f"# {task.capitalize()}", what, *entries]) + "\n"


def options(command: str) -> str:
    """A table of a command's options, with their defaults."""
    lines = ["| option | meaning | default |", "|---|---|---|"]
    for field in sorted(fields(COMMANDS[command]), key=is_optional):
        text = str(field.metadata["help"]).replace("|", r"\|")
        # Not in backticks: a browser would break a line behind its hyphens.
        name = f'<code class="option">--{field.name}</code>'
        lines.append(f"| {name} | {text} | {default_of(field)} |")
    return "\n".join(lines)


def is_optional(field: Field[Any]) -> bool:
    """Tell whether an option may be left out."""
    return field.default is not MISSING


def default_of(field: Field[Any]) -> str:
    """What holds where an option is left out."""
    if not is_optional(field):
        return "must be given"
    if field.default in (None, False):
        return "-"
    return f"`{field.default}`"


def messages() -> Iterator[str]:
    """Every message, by the moment in which one sees it, as lines of Markdown."""
    moments = {part: title for title, parts in MOMENTS.items() for part in parts}
    found: dict[str, set[tuple[str, str]]] = {title: set() for title in MOMENTS}
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).with_suffix("").parts[0]
        title = moments.get(part, ELSEWHERE)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found.setdefault(title, set()).update(messages_of(tree))
    for title, of_title in found.items():
        yield from ("", f"### {title}", "", "| what you see | kind |", "|---|---|")
        yield from (f"| {text} | {kind} |" for text, kind in sorted(of_title))


def messages_of(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Text and kind of each message that a module raises or warns of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "warn",
            "warnings.warn",
        ):
            call = node
        else:
            continue
        kind = ast.unparse(call.func)
        text = written(call.args[0]) if call.args else ""
        if any(character.isalpha() for character in text.replace("…", "")):
            yield text.replace("|", r"\|"), "warning" if "warn" in kind else kind


def written(node: ast.expr) -> str:
    """A message with "…" in place of what is known only when it is raised."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return written(node.left) + written(node.right)
    return "…"
