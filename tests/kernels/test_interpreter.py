"""Each `test_*on_device.py` in Triton's interpreter, in a process of its own: Triton reads the switch at its import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEVICE_TESTS = sorted(Path(__file__).parent.glob("*/test_*on_device.py"))


@pytest.mark.parametrize("file", DEVICE_TESTS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_kernels_in_the_interpreter(file: Path) -> None:
    # numpy multiplies there, and its BLAS for newer processors sums in an order that depends on the shapes.
    blas = {"OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Nehalem"}
    environment = os.environ | {"TRITON_INTERPRET": "1"} | blas
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "passed" in run.stdout, run.stdout[-2000:]
