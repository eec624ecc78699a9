"""Each `test_*on_device.py` in Triton's interpreter, in a process that is: Triton reads the switch at its import."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import matrix

DEVICE_TESTS = sorted(Path(__file__).parent.glob("*/test_*on_device.py"))


@pytest.fixture(scope="module")
def interpreter() -> Iterator[subprocess.Popen[str]]:
    """interpreted.py, which runs a file in a process of its own."""
    # numpy multiplies there, and its BLAS for newer processors sums in an order that depends on the shapes.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Nehalem"}
    environment |= {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "tests.kernels.interpreted"]
    root = Path(__file__).parents[2]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    )
    yield process
    # With the file that it still runs, where that one took too long.
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("file", DEVICE_TESTS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_kernels_in_the_interpreter(
    file: Path, interpreter: subprocess.Popen[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    output = tmp_path / "output"
    arguments = ["-q", "-p", "no:cacheprovider", *matrix.options(request.config), str(file)]
    assert interpreter.stdin is not None
    assert interpreter.stdout is not None
    print(json.dumps([str(output), *arguments]), file=interpreter.stdin, flush=True)
    status = interpreter.stdout.readline().strip()
    shown = output.read_text()
    assert status == "0", f"{status}: {shown[-6000:]}"
    assert "passed" in shown, shown[-2000:]
