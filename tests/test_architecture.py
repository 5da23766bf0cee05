"""The package's layout: imports run one way, and functions are short."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "laplace_lora_ext"
# From the ground up: what a file imports is on its own floor, or below.
FLOORS = [
    {"messages", "rounding", "draws"},
    {"processes"},
    {"models"},
    {"saving"},
    {"tasks"},
    {"passes"},
    {"curvature"},
    {"predictive"},
    {"training"},
    {"tuning"},
    {"predicting"},
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
MOVING = {"torch.as_tensor", "torch.asarray"}
# In lines, the docstring left out.
LONGEST_FUNCTION = 60


def modules() -> dict[str, Path]:
    """Name the package's files, such as `curvature.block`.

    A folder's own file has the folder's name.
    """
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        within = path.relative_to(PACKAGE)
        *folders, own_name = within.with_suffix("").parts
        parts = [*folders, own_name]
        if folders and own_name == "__init__":
            parts = folders
        name = ".".join(parts)
        names[name] = path
    return names


MODULES = modules()


def nodes_of(name: str) -> Iterator[ast.AST]:
    """List all of a file's syntax."""
    path = MODULES[name]
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    return ast.walk(tree)


def imports(name: str) -> set[str]:
    """Find the package's files that a file imports, anywhere in it."""
    found = set()
    for node in nodes_of(name):
        for imported in imported_by(node, name):
            package, _, target = imported.partition(".")
            if package == PACKAGE.name:
                found.add(target or "__init__")
    # What is imported of a file, such as a class, is none.
    return found & MODULES.keys()


def imported_by(node: ast.AST, name: str) -> list[str]:
    """List whatever may be a module, with its package."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert not node.level, f"{name}: a relative import"
        may_be_modules = [node.module]
        for alias in node.names:
            # `from package.folder import module` imports the module.
            may_be_modules.append(f"{node.module}.{alias.name}")
        return may_be_modules
    return []


def floor(name: str) -> int:
    """Find a file's floor, or its folder's.

    What trains a model needs less than what fits it, too.
    """
    folder, *_ = name.split(".")
    for room in (name, folder):
        for number, rooms in enumerate(FLOORS):
            if room in rooms:
                return number
    raise AssertionError(f"{name} has no floor")


def test_imports_run_one_way():
    n_imports = 0
    for name in MODULES:
        for other in imports(name):
            n_imports += 1
            assert floor(other) <= floor(name), f"{name} imports {other}"
    # That imports are found at all.
    assert n_imports > 100


def test_no_imports_run_in_a_circle():
    graph = {name: imports(name) for name in MODULES}
    sorter = TopologicalSorter(graph)
    # It names a cycle that it comes to.
    sorter.prepare()


def n_lines(node: ast.stmt) -> int:
    before = node.lineno - 1
    return node.end_lineno - before


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def length_of(node: ast.stmt) -> int:
    """Count a function's lines, its docstring left out."""
    length = n_lines(node)
    if ast.get_docstring(node):
        docstring, *_ = node.body
        length -= n_lines(docstring)
    return length


def test_functions_fit_on_a_screen():
    lengths = {}
    for name in MODULES:
        for node in nodes_of(name):
            if isinstance(node, FUNCTIONS):
                lengths[f"{name}.{node.name}"] = length_of(node)
    # That functions are found at all.
    assert len(lengths) > 200
    for function, length in lengths.items():
        assert length <= LONGEST_FUNCTION, function


def test_tensors_stay_where_they_are():
    """Within `cpu_as_default`, torch's own function moves them to the CPU."""
    for name in MODULES:
        for node in nodes_of(name):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in MOVING:
                keywords = [keyword.arg for keyword in node.keywords]
                assert "device" in keywords, name
