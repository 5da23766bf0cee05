"""Pages that each build of the site makes anew, from the repository as it is.

Documents that live elsewhere in the repository keep their paths, and so their links.
The reference lists every public name; the page of errors and warnings ends with every
message of the package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import laplace_lora_ext as package

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / package.__name__
SHARED = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "examples/*.ipynb",
    "examples/*.png",
    "benchmarks/README.md",
    "benchmarks/results/*",
    "benchmarks/figures/*",
)
MESSAGES = "<!-- messages -->"


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
    files.append(File.generated(config, "reference.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put the package's messages where a page asks for them, and mend links.

    Guides stand in the site's own folder: links to them lose `docs/`, and theirs to
    the rest of the repository lose `../`.
    """
    markdown = markdown.replace("](docs/", "](")
    if "/" not in page.file.src_uri:
        markdown = markdown.replace("](../", "](")
    if MESSAGES not in markdown:
        return markdown
    return markdown.replace(MESSAGES, "\n".join(messages()))


def reference() -> str:
    """Every public name, and the measures."""
    of_modules = {
        "Measures": "laplace_lora_ext.metrics",
        "Pictures": "laplace_lora_ext.plots",
    }
    public = [f"{package.__name__}.{name}" for name in package.__all__]
    sections = {
        "Public names": [name for name in public if name not in of_modules.values()]
    }
    sections |= {title: [module] for title, module in of_modules.items()}
    lines = ["# Reference"]
    for title, names in sections.items():
        lines += [f"## {title}", *(f"::: {name}" for name in names)]
    return "\n\n".join(lines) + "\n"


def messages() -> Iterator[str]:
    """A table for each file that raises errors or warns, as lines of Markdown."""
    for path in sorted(PACKAGE.rglob("*.py")):
        found = list(messages_of(ast.parse(path.read_text(encoding="utf-8"))))
        if found:
            name = path.relative_to(PACKAGE).with_suffix("").as_posix()
            yield from ("", f"### {name}", "", "| | message |", "|---|---|")
            yield from (f"| {kind} | {text} |" for kind, text in found)


def messages_of(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Kind and text of each message that a module raises or warns of."""
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
            yield "UserWarning" if "warn" in kind else kind, text.replace("|", r"\|")


def written(node: ast.expr) -> str:
    """A message with "…" in place of what is known only when it is raised."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return written(node.left) + written(node.right)
    return "…"
