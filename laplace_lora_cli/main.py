"""The entry point of `laplace-lora`."""

from __future__ import annotations

import sys
import warnings
from argparse import Action, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import version
from inspect import cleandoc
from typing import Any

from laplace_lora_cli import arguments

USAGE = 2  # the exit code of whatever the user can mend


@dataclass(frozen=True)
class Command:
    """A command: its arguments, and where the function of its name is."""

    arguments: type[Any]
    module: str = "laplace_lora_ext.commands.run"


COMMANDS = {
    "demo": Command(arguments.DemoArguments, "laplace_lora_ext.commands.demo"),
    "calibrate": Command(arguments.CalibrateArguments),
    "predict": Command(arguments.PredictArguments),
    "report": Command(arguments.ReportArguments),
    "review": Command(arguments.ReviewArguments),
    "distill": Command(arguments.DistillArguments),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the command line asks for."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] in ("-h", "--help"):
        print(_overview())
        return
    if given == ["--version"]:
        print(version("laplace-lora-ext"))
        return
    name, *rest = given
    if name not in COMMANDS:
        there_are = _nearest(name, COMMANDS) or f"there are {', '.join(COMMANDS)}"
        _fail("laplace-lora", f"no command {name!r}: {there_are}")
    command = COMMANDS[name]
    parsed = _parse(name, command, rest)
    run = _function(command.module, name)
    from laplace_lora_ext.commands.texts import UsageError

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            run(parsed)
    except KeyboardInterrupt:
        if hasattr(parsed, "resume"):
            print("interrupted: go on with --resume", file=sys.stderr)
        sys.exit(130)
    # Of these kinds are the library's own refusals; NotImplementedError is a
    # RuntimeError.
    except (UsageError, ValueError, RuntimeError, OSError, ImportError) as error:
        if parsed.debug:
            raise
        _fail(f"laplace-lora {name}", str(error))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["laplace-lora COMMAND [--help]", ""]
    for name, command in COMMANDS.items():
        summary = cleandoc(command.arguments.__doc__ or "").partition("\n")[0]
        lines.append(f"  {name:<{width}}  {summary}")
    return "\n".join(lines)


def _parse(name: str, command: Command, given: Sequence[str]) -> Any:
    from transformers import HfArgumentParser

    summary, _, example = cleandoc(command.arguments.__doc__ or "").partition("\n\n")
    parser = HfArgumentParser(
        command.arguments,  # pyright: ignore[reportArgumentType]
        prog=f"laplace-lora {name}",
        description=summary,
        epilog=f"example:\n  {example}",
        formatter_class=_WithDefaults,
    )
    parsed, unknown = parser.parse_known_args(given)
    if unknown:
        options = [name for action in parser._actions for name in action.option_strings]
        hint = _nearest(unknown[0], options) or "--help lists all"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}: {hint}")
    # Not by the parser's own way into a dataclass, to which an unknown option is a bug.
    return command.arguments(**vars(parsed))


class _WithDefaults(RawDescriptionHelpFormatter):
    """Writes defaults that are numbers or names behind the help of an option."""

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        is_told = isinstance(action.default, int | float | str)
        if not is_told or isinstance(action.default, bool) or action.dest == "help":
            return text
        return f"{text}; {action.default} by default"


def _nearest(given: str, names: Iterable[str]) -> str | None:
    """Ask whether the most similar name was meant, if one is similar."""
    similar = get_close_matches(given, list(names), n=1)
    return f"did you mean {similar[0]}?" if similar else None


def _function(module: str, name: str) -> Callable[[Any], None]:
    from importlib import import_module

    return getattr(import_module(module), name)


def _show_warning(
    message: Warning | str, category: type[Warning], *_: Any, **__: Any
) -> None:
    """Show a warning as a line, without the place in the code that it comes from."""
    if category is UserWarning:
        print(f"warning: {message}", file=sys.stderr)


def _fail(command: str, message: str) -> None:
    print(f"{command}: error: {message}", file=sys.stderr)
    sys.exit(USAGE)
