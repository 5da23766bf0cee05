"""The package's layout: imports run one way."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "laplace_lora_ext"
# From the ground up: what a file imports is on its own floor, or below.
FLOORS = [
    {"messages"},
    {"processes"},
    {"models"},
    {"saving"},
    {"tasks"},
    {"passes"},
    {"curvature"},
    {"predictive"},
    {"training"},
    {"predicting"},
    {"tuning"},
    {"metrics"},
    {"fit"},
    {"lora_laplace"},
    {"laplace"},
    {"merging", "mixture"},
    {"training.stages"},
    {"plots"},
    {"__init__"},
    {"commands"},
]
# They move to the default device, if they are told no other.
MOVING = ("torch.as_tensor", "torch.asarray")
IMPORT = re.compile(rf"^\s*(?:from|import) {PACKAGE.name}\.?([\w.]*)", re.MULTILINE)

# Files by their names, such as `curvature.kron`; a folder's own is the folder's.
TEXTS = {
    re.sub(r"\.__init__$", "", ".".join(path.relative_to(PACKAGE).parts)[:-3]): (
        path.read_text(encoding="utf-8")
    )
    for path in PACKAGE.rglob("*.py")
}
IMPORTS = {
    name: {found or "__init__" for found in IMPORT.findall(text)}
    for name, text in TEXTS.items()
}


def floor(name: str) -> int:
    """Find a file's floor, or its folder's."""
    for room in (name, name.split(".")[0]):
        for number, rooms in enumerate(FLOORS):
            if room in rooms:
                return number
    raise AssertionError(f"{name} has no floor")


def test_imports_run_one_way_and_in_no_circle():
    assert sum(map(len, IMPORTS.values())) > 100
    for name, imported in IMPORTS.items():
        for other in imported:
            assert floor(other) <= floor(name), f"{name} imports {other}"
    # It names a cycle that it comes to.
    TopologicalSorter(IMPORTS).prepare()


def test_tensors_stay_where_they_are():
    """Within `cpu_as_default`, torch's own function moves them to the CPU."""
    for name, text in TEXTS.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in MOVING:
                assert "device" in {each.arg for each in node.keywords}, name
