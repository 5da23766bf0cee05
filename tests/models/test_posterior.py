"""What functions need of a posterior: every posterior has it, and nothing more is listed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from laplace_lora_ext.models import posterior
from tests.support.posteriors import STRUCTURES, fitted

FILE = Path(posterior.__file__)
(CLASS,) = (
    node for node in ast.parse(FILE.read_text("utf-8")).body if isinstance(node, ast.ClassDef)
)
ATTRIBUTES = {ast.unparse(node.target) for node in CLASS.body if isinstance(node, ast.AnnAssign)}
TOP = ("saving",)
METHODS = {node.name for node in CLASS.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_posterior_has_what_functions_need(structure):
    la = fitted(structure=structure)
    assert len(ATTRIBUTES) > 10
    assert len(METHODS) > 10
    assert {name for name in ATTRIBUTES | METHODS if not hasattr(la, name)} == set()


def test_functions_use_all_of_it():
    sources = "".join(path.read_text("utf-8") for path in FILE.parents[1].glob("*/*.py"))
    sources += "".join((FILE.parents[1] / f"{name}.py").read_text("utf-8") for name in TOP)
    used = set(re.findall(r"\bla\.(\w+)", sources)) | {"__call__"}
    assert (ATTRIBUTES | METHODS) - used == set()
