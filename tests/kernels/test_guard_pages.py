"""The guard behind tensors is there: what lies within them can be read, what lies behind cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.kernels.guard_pages import GuardPages

KERNEL = """
import torch
import triton
import triton.language as tl
from tests.kernels.guard_pages import GuardPages


@triton.jit
def copy(source, target, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + at, tl.load(source + at))


with GuardPages():
    source, target = torch.ones({source}), torch.zeros({target})
copy[(1,)](source, target, 128)
assert target.sum() == 128
"""


@pytest.mark.parametrize(("source", "target"), [(128, 128), (124, 128), (128, 124)])
def test_a_kernel_that_goes_beyond_a_tensor_dies(source: int, target: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KERNEL.format(source=source, target=target))
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join((str(root), *sys.path))}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == (0 if source == target else -signal.SIGSEGV), run.stderr


def test_tensors_are_what_they_were() -> None:
    shape, generator = (3, 5, 7), torch.Generator().manual_seed(1)
    made = torch.randn(shape, generator=generator)
    with GuardPages():
        guarded = torch.randn(shape, generator=generator.manual_seed(1))
        turned = guarded.transpose(0, 2).clone(memory_format=torch.preserve_format)
        part = guarded[1]
        part += 1.0
    assert torch.equal(guarded[0], made[0])
    assert torch.equal(guarded[1], made[1] + 1.0)
    assert turned.stride() == made.transpose(0, 2).stride()
    assert torch.equal(turned[:, :, 0], made.transpose(0, 2)[:, :, 0])
