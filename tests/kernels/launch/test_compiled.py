"""A tape of C kernels: the same results from other data in the same memory, and no tape of what it would not hold."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.kernels.block_gemm.test_blocks import random_rows

import stoker_kernels
from stoker_kernels.activation import silu_and_mul
from stoker_kernels.block_gemm import block_linear, block_rows, pack
from stoker_kernels.launch import cc
from stoker_kernels.launch.compiled import Tape, refuse_tape
from stoker_kernels.norm import add_rms_norm, rms_norm
from stoker_kernels.quant import BlockRows, BlockWeight

WITHOUT = next((why for stem in ("cpu_tape", "cpu_norm", "cpu_packed_floats") if (why := cc.refusal(stem))), None)
pytestmark = pytest.mark.skipif(WITHOUT is not None, reason=f"kernels in C: {WITHOUT}")


def packed(rows: int, columns: int) -> BlockWeight:
    return pack(BlockWeight((BlockRows("Q8_0", random_rows("Q8_0", rows, columns)),), columns))


def test_a_tape_computes_anew_what_lies_where_it_lay() -> None:
    columns, inner, tokens = 32 * random.randint(1, 9), random.randint(1, 9), random.randint(4, 9)
    table, both, back = packed(48, columns), packed(2 * 32 * inner, columns), packed(64, 32 * inner)
    narrow = pack(BlockWeight((BlockRows("Q4_1", random_rows("Q4_1", 48, 64)),), 64))
    gain, last = torch.randn(columns), torch.randn(64)
    ids = torch.zeros(tokens, dtype=torch.int32)
    out = torch.empty(tokens, 64)

    def layer() -> torch.Tensor:
        hidden = rms_norm(block_rows(ids, table, torch.float32), gain, 1e-5)
        update = block_linear(silu_and_mul(block_linear(hidden, both)), back)
        return add_rms_norm(update, block_rows(ids, narrow, torch.float32), last, 1e-5, out=out)

    tape = Tape()
    ids.random_(48)
    first = tape.record(layer).clone()
    assert tape.refusal is None
    assert tape.bytes >= (2 * columns + 3 * 32 * inner + 64) * tokens * 4
    assert torch.equal(first, layer())
    for _ in range(3):
        gc.collect()
        filled = [torch.randn(tokens, columns) for _ in range(9)]  # what freed memory would be given to
        ids.random_(48)
        tape.replay()
        replayed = out.clone()
        assert torch.equal(replayed, layer())
        del filled
    assert not torch.equal(replayed, first)


@pytest.mark.parametrize(
    "computes",
    [
        lambda x: x + 1,
        lambda x: x.mul_(2),
        lambda x: x.to(torch.float64),
        lambda x: x[: int(x[0, 0]) % 2],
        lambda x: torch.zeros_like(x),
        lambda x: x.t().contiguous(),
        lambda x: refuse_tape("it reads values"),
        lambda x: x.to_mkldnn(),  # whose memory has no address
        lambda x: x.to_mkldnn().to_dense(),
    ],
)
def test_what_torch_computes_has_no_tape(computes: Callable[[torch.Tensor], object]) -> None:
    x, gain = torch.randn(3, 48), torch.ones(48)

    def run() -> torch.Tensor:
        computes(x)
        return rms_norm(x, gain, 1e-5)

    tape = Tape()
    assert tape.record(run).shape == x.shape
    assert tape.refusal is not None
    with pytest.raises(AssertionError, match="not whole"):
        tape.replay()


def test_views_and_what_changes_nothing_have_one() -> None:
    x, gain = torch.randn(4, 96), torch.ones(48)

    def run() -> torch.Tensor:
        halves = x.view(8, 48)[2:].contiguous().float()
        return rms_norm(halves.reshape(-1, 48).unsqueeze(0)[0], gain, 1e-5)

    tape = Tape()
    result = tape.record(run)
    assert tape.refusal is None
    x.normal_()
    tape.replay()
    assert torch.equal(result, rms_norm(x.view(8, 48)[2:], gain, 1e-5))


def test_a_call_outside_a_tape_is_not_noted() -> None:
    x, gain = torch.randn(2, 32), torch.ones(32)
    tape = Tape()
    result = tape.record(lambda: rms_norm(x, gain, 1e-5))
    rms_norm(torch.randn(2, 32), gain, 1e-5, out=torch.empty(2, 32))
    expected = result.clone()
    result.zero_()
    tape.replay()
    assert torch.equal(result, expected)


def test_whoever_calls_a_library_otherwise_says_that_no_tape_has_it() -> None:
    callers = {path for path in Path(stoker_kernels.__file__).parent.rglob("*.py") if "cc.library(" in path.read_text()}
    others = {path.name for path in callers if "refuse_tape(" not in path.read_text()}
    # The tape itself, and packing, which is done once at load.
    assert others == {"cpu_packed.py"}
    assert {"cpu_dot.py", "cpu_attention.py", "cpu.py", "compiled.py"} <= {path.name for path in callers}


def test_a_user_without_a_name_has_tapes() -> None:
    """As in a pod. torch's compiler asks for the name when it is imported, which a watch of what torch computes did."""
    code = """
        import os, pwd, sys
        for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
            os.environ.pop(name, None)
        def nameless(uid):
            raise KeyError(uid)
        pwd.getpwuid = nameless
        import torch
        from stoker_kernels.launch.compiled import Tape
        kept, refused = Tape(), Tape()
        kept.record(lambda: torch.empty(24).view(4, 6))
        refused.record(lambda: torch.arange(5).long() + 1)
        print(kept.bytes, kept.refusal, refused.refusal is not None, "torch._dynamo" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["96", "None", "True", "False"], done.stderr
