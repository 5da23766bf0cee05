"""Commands as users call them."""

from laplace_lora_cli import main


def run(command: str, **options: object) -> None:
    """Run a command; options with several values are tuples."""
    given = command.split()
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        given += [f"--{name}", *map(str, values)]
    main(given)
