"""Help, versions and errors of `laplace-lora`."""

import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from laplace_lora_cli import COMMANDS, _parse, main
from laplace_lora_ext.commands import loading
from tests.support.commands import run


def test_help_imports_neither_torch_nor_the_package():
    # Whoever asks for help waits for neither: they take seconds.
    code = (
        "import sys, contextlib\n"
        "from laplace_lora_cli import main\n"
        "main([])\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main(['predict', '--help'])\n"
        "print({'torch', 'laplace_lora_ext'} & sys.modules.keys())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1] == "set()"


def test_without_a_command_all_are_listed(capsys):
    main([])
    overview = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name} " in overview


@pytest.mark.parametrize("name", COMMANDS)
def test_help_tells_defaults_and_a_line_to_paste(name, capsys):
    with pytest.raises(SystemExit) as exit_of:
        main([name, "--help"])
    assert not exit_of.value.code
    words = " ".join(capsys.readouterr().out.split())
    assert re.search(r"; \d+ by default", words)
    assert "False" not in words
    _, _, example = words.partition("example: laplace-lora ")
    command, *given = example.split()
    assert command == name
    _parse(command, given)


def test_other_commands_and_options_are_named(capsys, options, refusal):
    with pytest.raises(SystemExit):
        main(["calibrates"])
    assert "'calibrates': there are demo, calibrate" in capsys.readouterr().err
    assert "--bach_size 4" in refusal("calibrate", bach_size=4, **options)


def test_the_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out.strip() == version("laplace-lora-ext")


def test_debugging_shows_where_an_error_comes_from(options, monkeypatch, refusal):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loading.Loaded, "batches", fail)
    assert "out of memory" in refusal("calibrate", **options)
    with pytest.raises(RuntimeError, match="out of memory"):
        run("calibrate --debug", **options)
