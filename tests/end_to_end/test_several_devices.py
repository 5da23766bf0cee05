"""A model whose layers are on several devices predicts and tunes as on one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.backend_registration as registration


@pytest.mark.skipif(
    not hasattr(registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch knows no devices made of Python",
)
def test_several_devices():
    path = Path(__file__).with_name("several_devices.py")
    # Neither the project's own options, nor further processes, nor a cache.
    options = ["-o", "addopts=", "-p", "no:xdist", "-p", "no:cacheprovider", "-q"]
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not run.returncode, run.stdout + run.stderr
    # Without any test the run would succeed, too.
    assert " passed" in run.stdout
