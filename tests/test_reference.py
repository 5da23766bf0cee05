"""The reference: docstrings that describe every option."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import torch

import laplace_lora_ext as package

# Up to the next section's title. An entry is not indented.
PARAMETERS = re.compile(r"^Parameters\n-+\n(.*?)(?=\n\n\w+\n---|\Z)", re.M | re.S)
ENTRY = re.compile(r"^(\S.*?)(?: : .*)?$", re.M)
DEFAULT = re.compile(r"^(\w+) : .*default=(.*)$", re.M)
# Another method has the list.
ELSEWHERE = re.compile(r"(those of|as for)\s+`")


def described() -> Iterator[tuple[str, Any, bool]]:
    """List public functions, classes and their methods where they are defined.

    And tell whether a base describes them.
    """
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for name, found in vars(importlib.import_module(info.name)).items():
            if getattr(found, "__module__", None) != info.name or name[0] == "_":
                continue
            yield f"{info.name}.{name}", found, False
            for method, value in vars(found).items() if inspect.isclass(found) else ():
                # A class method holds its function.
                function = getattr(value, "__func__", value)
                is_public = method == "__call__" or method[0] != "_"
                if is_public and inspect.isfunction(function):
                    overrides = any(hasattr(base, method) for base in found.__bases__)
                    yield f"{info.name}.{name}.{method}", function, overrides


def arguments_of(found: Any) -> list[str]:
    """Name what it takes, with the stars of what takes all others."""
    arguments = map(str, inspect.signature(found).parameters.values())
    names = [re.split("[:=]", argument)[0] for argument in arguments]
    return [name for name in names if name not in ("self", "cls")]


def test_every_option_is_described():
    shown = [getattr(package, name) for name in package.__all__]
    n_lists = 0
    for name, found, overrides in described():
        text = inspect.cleandoc(found.__doc__ or "")
        section = PARAMETERS.search(text)
        is_function = inspect.isfunction(found)
        # Another class describes what it inherits.
        takes_its_own = is_dataclass(found) or "__init__" in vars(found)
        is_shown = found in shown or name.split(".")[-2] in package.__all__
        if section is not None and (is_function or takes_its_own):
            n_lists += 1
            assert sorted(ENTRY.findall(section[1])) == sorted(arguments_of(found)), (
                name
            )
            parameters = inspect.signature(found).parameters
            for option, default in DEFAULT.findall(section[1]):
                assert parameters[option].default == eval(default, {"torch": torch}), (
                    name
                )
        # One argument is what the docstring itself is about.
        elif is_function and is_shown and len(arguments_of(found)) > 1:
            assert overrides or ELSEWHERE.search(text), name
    # That lists are found at all.
    assert n_lists > 50
