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


def test_help_needs_no_heavy_import_and_names_every_command():
    command = [sys.executable, "-c", PRINT_HELP]
    # It fails where torch has been imported.
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    for experiment in COMMANDS:
        assert name_of(experiment) in finished.stdout
        for field in fields(experiment):
            assert field.metadata["help"]


def test_help_names_every_contestant(capsys):
    with pytest.raises(SystemExit):
        main(["cost", "--help"])
    # Lines may be broken anywhere.
    text = " ".join(capsys.readouterr().out.split())
    for key in CONTESTANTS:
        assert key in text
