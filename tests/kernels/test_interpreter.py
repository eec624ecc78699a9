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


def run(interpreter: subprocess.Popen[str], output: Path, *arguments: str) -> str:
    """The status of a pytest with these arguments in the interpreter's process, as it says it."""
    assert interpreter.stdin is not None
    assert interpreter.stdout is not None
    print(json.dumps([str(output), "-q", "-p", "no:cacheprovider", *arguments]), file=interpreter.stdin, flush=True)
    return interpreter.stdout.readline().strip()


@pytest.mark.parametrize("file", DEVICE_TESTS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_kernels_in_the_interpreter(
    file: Path, interpreter: subprocess.Popen[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    status = run(interpreter, tmp_path / "output", *matrix.options(request.config), str(file))
    shown = (tmp_path / "output").read_text()
    assert status == "0", f"{status}: {shown[-6000:]}"
    assert "passed" in shown, shown[-2000:]


def test_what_ends_a_process_ends_no_other_files(interpreter: subprocess.Popen[str], tmp_path: Path) -> None:
    interprets = "from stoker_kernels.launch import dispatch\n\ndef test_it():\n    assert dispatch.interpreting()\n"
    texts = {
        "dies": "import os\n\ndef test_it():\n    os.kill(os.getpid(), 11)\n",
        "fails": "def test_it():\n    assert 0\n",
        "interprets": interprets,
    }
    found = {}
    for name, text in texts.items():
        (tmp_path / f"test_{name}.py").write_text(text)
        found[name] = run(interpreter, tmp_path / "output", str(tmp_path / f"test_{name}.py"))
    assert found == {"dies": "-11", "fails": "1", "interprets": "0"}, (tmp_path / "output").read_text()
