"""stoker_runtime/terminal/info.py in a process of its own: what it says does not hang on what else was imported."""

from __future__ import annotations

import subprocess
import sys


def test_ops_are_listed_without_a_model() -> None:
    command = [sys.executable, "-m", "stoker_cli", "info"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    kernels = done.stdout.partition("\nKernels\n")[2].split()
    assert {"linear", "paged_attention", "rms_norm"} <= set(kernels)
