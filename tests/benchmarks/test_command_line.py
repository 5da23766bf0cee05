"""The command line: quick help, and options that make no sense."""

import subprocess
import sys
from dataclasses import fields

import pytest

from benchmarks.__main__ import COMMANDS, name_of
from benchmarks.methods import CALIBRATED
from benchmarks.methods.method import find_methods

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


def test_a_method_that_is_unknown_is_refused_with_those_that_are_known():
    (diag,) = find_methods(CALIBRATED, ["Stock diag"])
    assert diag.key == "diag"
    with pytest.raises(SystemExit, match=r"'unheard of'.*kron \(Stock Kron\)"):
        find_methods(CALIBRATED, ["unheard of"])
