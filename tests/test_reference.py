"""The reference: docstrings that give the type of every option."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest

import laplace_lora_ext as package

SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}\n", re.MULTILINE)
ENTRY = re.compile(r"^(\S.*?)(?: : .*)?$", re.MULTILINE)  # of a section, not indented
ELSEWHERE = re.compile(r"(those of|as for)\s+`")  # another method has the list
STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


@dataclass(frozen=True)
class Documented:
    """A public class, function or method of the package."""

    name: str
    found: Callable[..., Any]

    @property
    def docstring(self) -> str:
        return inspect.cleandoc(self.found.__doc__ or "")

    @cached_property
    def sections(self) -> dict[str, list[str]]:
        """Names of the entries of each section of the docstring."""
        _, *parts = SECTION.split(self.docstring)  # by turns titles and bodies
        return {
            title: ENTRY.findall(body)
            for title, body in zip(parts[::2], parts[1::2], strict=True)
            if title in ("Parameters", "Attributes", "Raises")
        }

    @property
    def arguments(self) -> list[str]:
        """Names of the signature, with the stars of those that take all others."""
        parameters = inspect.signature(self.found).parameters.values()
        return [
            STARS.get(parameter.kind, "") + parameter.name
            for parameter in parameters
            if parameter.name not in ("self", "cls")
        ]

    @property
    def inherits_arguments(self) -> bool:
        """Whether it is a class whose arguments another one describes."""
        is_dataclass = hasattr(self.found, "__dataclass_fields__")
        return (
            inspect.isclass(self.found)
            and not is_dataclass
            and ("__init__" not in vars(self.found))
        )


def modules() -> Iterator[Any]:
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(info.name)


def members_of(name: str, cls: type) -> Iterator[Documented]:
    """List a class's own public methods."""
    for method, value in vars(cls).items():
        function = getattr(value, "__func__", value)  # of a class method
        if inspect.isfunction(function) and (method == "__call__" or method[0] != "_"):
            yield Documented(f"{name}.{method}", function)


def documented() -> Iterator[Documented]:
    """List whatever is public in the package, each where it is defined."""
    for module in modules():
        for name, found in vars(module).items():
            if name[0] == "_" or getattr(found, "__module__", None) != module.__name__:
                continue
            if inspect.isclass(found):
                yield from members_of(f"{module.__name__}.{name}", found)
            if inspect.isclass(found) or inspect.isfunction(found):
                yield Documented(f"{module.__name__}.{name}", found)


def of_reference() -> Iterator[Documented]:
    """List the functions and methods that the site's reference shows."""
    for name in package.__all__:
        found = getattr(package, name)
        if inspect.isclass(found):
            for member in members_of(name, found):
                method = member.name.rpartition(".")[2]
                is_described_by_base = any(
                    method in vars(base) for base in found.__mro__[1:]
                )
                if not is_described_by_base:
                    yield member
        elif inspect.isfunction(found):
            yield Documented(name, found)
        elif inspect.ismodule(found):
            for part, value in vars(found).items():
                is_own = getattr(value, "__module__", None) == found.__name__
                if part[0] != "_" and is_own and inspect.isfunction(value):
                    yield Documented(f"{name}.{part}", value)


@pytest.mark.parametrize("each", list(documented()), ids=lambda each: each.name)
def test_every_option_has_a_line_of_its_own(each):
    for title, entries in each.sections.items():
        for entry in entries:
            assert "," not in entry, f"{title} of {each.name} has one line for {entry}"
    if "Parameters" in each.sections and not each.inherits_arguments:
        assert sorted(each.sections["Parameters"]) == sorted(each.arguments)


@pytest.mark.parametrize("each", list(of_reference()), ids=lambda each: each.name)
def test_the_reference_describes_every_option(each):
    described = "Parameters" in each.sections or ELSEWHERE.search(each.docstring)
    assert described or len(each.arguments) < 2
