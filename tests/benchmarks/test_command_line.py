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
