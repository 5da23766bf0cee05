"""Commands as users call them, and what they have calibrated."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from laplace_lora_cli import main


def run(command: str, **options: object) -> None:
    """Run a command; options with several values are tuples."""
    given = command.split()
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        given += [f"--{name}", *map(str, values)]
    main(given)


@dataclass(frozen=True)
class Calibrated:
    """An adapter with a posterior, and labelled texts."""

    # Of commands that read the posterior: nothing of what it was fitted with.
    options: dict[str, object]
    names: Sequence[str]
    # The option that names them, as `calibrate` was told.
    named: dict[str, object]
    train: Path
    test: Path
    printed: str
