"""The command line: quick help, and options that make no sense."""

import subprocess
import sys
from dataclasses import fields

import pytest

from benchmarks.__main__ import COMMANDS, main, name_of
from benchmarks.options import CONTESTANTS

PRINT_HELP = """
import sys
from benchmarks.__main__ import build_parser
build_parser().print_help()
sys.exit("torch" in sys.modules)
"""


def test_help_needs_no_heavy_import_and_names_every_command_and_contestant(capsys):
    command = [sys.executable, "-c", PRINT_HELP]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for experiment in COMMANDS:
        assert name_of(experiment) in text
        assert all(field.metadata["help"] for field in fields(experiment))
    with pytest.raises(SystemExit):
        main(["cost", "--help"])
    # Lines may be broken anywhere.
    text = " ".join(capsys.readouterr().out.split())
    assert all(key in text for key in CONTESTANTS)
