"""The reference: docstrings that give the type of every option."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any

import laplace_lora_ext as package

SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}\n", re.MULTILINE)
# An entry of a section is not indented.
ENTRY = re.compile(r"^(\S.*?)(?: : .*)?$", re.MULTILINE)
# Another method has the list.
ELSEWHERE = re.compile(r"(those of|as for)\s+`")
LISTS = ("Parameters", "Attributes", "Raises")
STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


@dataclass(frozen=True)
class Documented:
    """A public class, function or method of the package."""

    name: str
    found: Callable[..., Any]

    @property
    def docstring(self) -> str:
        text = self.found.__doc__ or ""
        return inspect.cleandoc(text)

    @cached_property
    def sections(self) -> dict[str, list[str]]:
        """Names of the entries of each section of the docstring."""
        # Titles and bodies take turns.
        _, *parts = SECTION.split(self.docstring)
        sections = zip(parts[::2], parts[1::2], strict=True)
        return {
            title: ENTRY.findall(body) for title, body in sections if title in LISTS
        }

    @property
    def arguments(self) -> list[str]:
        """Names of the signature, with the stars of those that take all others."""
        parameters = inspect.signature(self.found).parameters
        return [
            STARS.get(parameter.kind, "") + name
            for name, parameter in parameters.items()
            if name not in ("self", "cls")
        ]

    @property
    def inherits_arguments(self) -> bool:
        """Whether it is a class whose arguments another one describes."""
        is_class = inspect.isclass(self.found) and not is_dataclass(self.found)
        return is_class and "__init__" not in vars(self.found)


def modules() -> Iterator[Any]:
    prefix = f"{package.__name__}."
    for info in pkgutil.walk_packages(package.__path__, prefix):
        yield importlib.import_module(info.name)


def members_of(name: str, cls: type) -> Iterator[Documented]:
    """List a class's own public methods."""
    for method, value in vars(cls).items():
        # A class method holds its function.
        function = getattr(value, "__func__", value)
        is_public = method == "__call__" or is_public_name(method)
        if is_public and inspect.isfunction(function):
            yield Documented(f"{name}.{method}", function)


def is_public_name(name: str) -> bool:
    return not name.startswith("_")


def defined_in(module: Any) -> Iterator[tuple[str, Any]]:
    """List what a module defines itself, public by its name."""
    for name, found in vars(module).items():
        # Numbers and strings don't know where they were written.
        origin = getattr(found, "__module__", None)
        is_own = origin == module.__name__
        if is_own and is_public_name(name):
            yield name, found


def documented() -> Iterator[Documented]:
    """List whatever is public in the package, each where it is defined."""
    for module in modules():
        for name, found in defined_in(module):
            full_name = f"{module.__name__}.{name}"
            if inspect.isclass(found):
                yield from members_of(full_name, found)
                yield Documented(full_name, found)
            elif inspect.isfunction(found):
                yield Documented(full_name, found)


def new_members_of(name: str, cls: type) -> Iterator[Documented]:
    """List a class's public methods that no base describes."""
    _, *bases = cls.__mro__
    for member in members_of(name, cls):
        _, _, method = member.name.rpartition(".")
        if not any(method in vars(base) for base in bases):
            yield member


def of_reference() -> Iterator[Documented]:
    """List the functions and methods that the site's reference shows."""
    for name in package.__all__:
        found = getattr(package, name)
        if inspect.isclass(found):
            yield from new_members_of(name, found)
        elif inspect.isfunction(found):
            yield Documented(name, found)
        elif inspect.ismodule(found):
            for part, value in defined_in(found):
                if inspect.isfunction(value):
                    yield Documented(f"{name}.{part}", value)


def test_every_option_has_a_line_of_its_own():
    for each in documented():
        sections = each.sections
        for title, entries in sections.items():
            for entry in entries:
                message = f"{title} of {each.name} has one line for {entry}"
                assert "," not in entry, message
        parameters = sections.get("Parameters")
        if parameters is not None and not each.inherits_arguments:
            assert sorted(parameters) == sorted(each.arguments), each.name


def test_the_reference_describes_every_option():
    for each in of_reference():
        # One argument is what the docstring itself is about.
        if len(each.arguments) > 1:
            is_list = "Parameters" in each.sections
            assert is_list or ELSEWHERE.search(each.docstring), each.name
