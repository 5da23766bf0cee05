"""The command line: quick help, and options that make no sense."""

import subprocess
import sys

import pytest

from benchmarks.__main__ import COMMANDS, main
from benchmarks.options import CONTESTANTS


def test_help_needs_no_heavy_import_and_names_every_command_and_contestant(capsys):
    code = "import sys, benchmarks.__main__ as m; m.build_parser().print_help()"
    command = [sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for experiment in COMMANDS:
        assert experiment.__name__.lower() in text
        assert all(field.metadata["help"] for field in experiment.__dataclass_fields__.values())
    with pytest.raises(SystemExit):
        main(["cost", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(key in text for key in CONTESTANTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("stages --steps 0", "must be at least 1, not 0"),
        ("cost --contestants nobody", "invalid choice: 'nobody'"),
        ("cost --layers 1 1 1", "cost: give 1 numbers of layers and batches"),
        ("cost --classes 1", "--classes must be from 2 to 1000"),
        ("calibration --methods stock", "No method is called 'stock'; known are: map (MAP"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments, message, tmp_path, capsys):
    command, *options = arguments.split()
    if command == "cost":
        options = ["--hidden-sizes", "32", "--layers", "1", "--batches", "1", *options]
    with pytest.raises(SystemExit) as error:
        main([command, *options, "--output", str(tmp_path)])
    assert message in f"{error.value} {capsys.readouterr().err}"
