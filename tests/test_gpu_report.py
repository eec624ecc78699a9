"""What a failed test of a GPU leaves in the report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A GPU of 140 GiB, and two tests of it that fail; with `broken` nothing can be asked of it any more.
TESTS = """
import sys
from types import SimpleNamespace

import pytest

BROKEN = {broken}


def synchronize():
    if BROKEN:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\\nSearch for it.")


released = []
cuda = SimpleNamespace(
    is_initialized=lambda: True, synchronize=synchronize, mem_get_info=lambda: (14 << 30, 140 << 30),
    empty_cache=lambda: released.append(0),
)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2])
def test_on_a_gpu(number, monkeypatch):
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)
    assert len(released) == number - 1, "memory was kept"
    assert number == 0
"""


@pytest.mark.parametrize("broken", [False, True])
def test_a_failure_says_what_became_of_the_gpu(broken: bool, tmp_path: Path) -> None:
    file = tmp_path / "test_two.py"
    file.write_text(TESTS.format(broken=broken))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[1]), *sys.path))}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(file)]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    lost = "the GPU is lost since test_two.py::test_on_a_gpu[1]: CUDA error: an illegal memory access was encountered"
    assert (lost in run.stdout) == broken, run.stdout
    assert ("126.0 of 140.0 GiB in use" in run.stdout) == (not broken), run.stdout
    assert "memory was kept" not in run.stdout.replace('number - 1, "memory was kept"', ""), run.stdout
    assert f"{1 if broken else 2} failed" in run.stdout, run.stdout
