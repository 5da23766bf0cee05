"""The package's layout: imports run one way, and functions are short."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "laplace_lora_ext"
FOLDERS = [
    *("processes", "models", "passes", "curvature"),
    *("predictive", "training", "tuning", "text"),
]
FLOORS = [
    {"messages", "likelihoods"},
    *({folder} for folder in FOLDERS),
    {"saving", "sums", "metrics", "acquisitions"},
    {"fit", "problems"},
    {"lora_laplace"},
    {"structures"},
    {"laplace"},
    {"mixture", "training.callback"},
    {"training.stages"},
    {"plots"},
    {"__init__"},
    {"commands"},
]
MOVING = {
    "torch.as_tensor",
    "torch.asarray",
}  # to the default device, if they are told no other
LONGEST_FUNCTION = 60  # lines, its docstring left out


def modules() -> dict[str, Path]:
    """Name the package's files, such as `curvature.block`.

    A folder's own file has the folder's name.
    """
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[
            ".".join(
                parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
            )
        ] = path
    return names


MODULES = modules()


def imports(name: str) -> set[str]:
    """Modules of the package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: a relative import"
            parts = (node.module or "").split(".")
            # `from package.folder import module` imports the module.
            candidates = [[*parts, alias.name] for alias in node.names] + [parts]
        elif isinstance(node, ast.Import):
            candidates = [alias.name.split(".") for alias in node.names]
        else:
            continue
        for parts in candidates:
            if parts[0] == PACKAGE.name:
                target = ".".join(parts[1:]) or "__init__"
                found |= {target} & MODULES.keys()
    return found


def floor(name: str) -> int:
    """Find a file's floor, or its folder's.

    What trains a model needs less than what fits it, too.
    """
    for room in (name, name.split(".")[0]):
        for number, rooms in enumerate(FLOORS):
            if room in rooms:
                return number
    raise AssertionError(f"{name} has no floor")


def test_imports_run_one_way():
    graph = {name: imports(name) for name in MODULES}
    assert sum(map(len, graph.values())) > 100
    upwards = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if floor(other) > floor(name)
    ]
    assert not upwards
    tuple(TopologicalSorter(graph).static_order())  # raises on a cycle, and names it


def test_functions_fit_on_a_screen():
    lengths = {}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                if ast.get_docstring(node):
                    lines -= node.body[0].end_lineno - node.body[0].lineno + 1
                lengths[f"{name}.{node.name}"] = lines
    assert len(lengths) > 200
    assert {
        n: length for n, length in lengths.items() if length > LONGEST_FUNCTION
    } == {}


def test_tensors_stay_where_they_are():
    """Within `cpu_as_default`, torch's own function moves them to the CPU."""
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in MOVING:
                assert "device" in {keyword.arg for keyword in node.keywords}, name
