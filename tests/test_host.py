"""What the host takes of curvlinops, names that no release promises."""

import ast
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import curvlinops
import torch
from packaging.requirements import Requirement
from torch import nn

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def imported_names() -> list[str]:
    """List what the host's file imports of curvlinops, without importing the host."""
    (folder,) = find_spec("laplace").submodule_search_locations
    text = Path(folder, "curvature", "curvlinops.py").read_text(encoding="utf-8")
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "curvlinops":
            names += [alias.name for alias in node.names]
    return names


def test_curvlinops_has_what_the_host_imports():
    names = imported_names()
    assert names
    assert [name for name in names if not hasattr(curvlinops, name)] == []


def test_kronecker_factors_are_where_the_host_reads_them():
    layer = nn.Sequential(nn.Linear(3, 2))
    data = [(torch.ones(4, 3), torch.zeros(4).long())]
    operator = curvlinops.KFACLinearOperator(
        layer,
        nn.CrossEntropyLoss(reduction="sum"),
        list(layer.parameters()),
        data,
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    assert list(operator._mapping) == ["0"]
    assert operator._input_covariances["0"].shape == (3, 3)
    assert operator._gradient_covariances["0"].shape == (2, 2)


def test_the_release_without_these_names_is_not_installed():
    (line,) = re.findall(r'"(curvlinops-for-pytorch.*?)"', PYPROJECT.read_text())
    ours = Requirement(line).specifier
    assert version("curvlinops-for-pytorch") in ours
    for other in ("3.1", "3.1.0", "3.2", "4"):
        assert other not in ours
