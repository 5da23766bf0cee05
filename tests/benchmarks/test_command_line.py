"""The command line: quick help, and options that make no sense."""

import subprocess
import sys

import pytest

from benchmarks.__main__ import COMMANDS, build_parser, main
from benchmarks.options import CONTESTANTS


def test_help_needs_no_heavy_import_and_names_every_command():
    code = "import sys, benchmarks.__main__ as m; m.build_parser().print_help()"
    text = subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for experiment in COMMANDS:
        assert experiment.__name__.lower() in text


@pytest.mark.parametrize("experiment", COMMANDS)
def test_every_option_has_a_help_text(experiment):
    for field in experiment.__dataclass_fields__.values():
        assert field.metadata["help"]


def test_help_names_every_contestant(capsys):
    with pytest.raises(SystemExit):
        main(["cost", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(key in text for key in CONTESTANTS)


def test_numbers_below_one_are_refused(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["stages", "--steps", "0"])
    assert "must be at least 1, not 0" in capsys.readouterr().err
