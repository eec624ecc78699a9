"""The kernels of a shared prefix compiled for SM 9.0 with no GPU: that each tile fits, and uses what it is meant to."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_kernels.attention import variants
from stoker_kernels.attention.shared_prefix.config import SM
from stoker_kernels.attention.shared_prefix.triton_shared import shared_prefix_kernel
from stoker_kernels.launch import aot
from stoker_kernels.launch.aot_registry import specs

SHARED_KB = 227  # that a block has on SM 9.0, as NVIDIA states it


def tiles() -> list[aot.Variant]:
    """Each tile of the kernel in bf16 with heads of its own size and whole pages, by cache and head dimension."""
    assert variants.before_forms()
    mine = [spec for spec in specs() if spec.kernel is shared_prefix_kernel]
    made = [aot.Variant(spec, {**spec.constants[0], "LAUNCH_PDL": True}, SM) for spec in mine]
    return [each for each in made if each.constants["WHOLE"] and each.arguments["q_ptr"].startswith("*bf16")]


def name(variant: aot.Variant) -> str:
    shown = ("BLOCK_M", "BLOCK_N", "BLOCK_D", "FP8")
    return "-".join(f"{each.lower()}{variant.constants[each]}" for each in shown)


@pytest.mark.matrix(take=3)
@pytest.mark.parametrize("variant", tiles(), ids=name)
def test_a_tile_multiplies_on_tensor_cores_while_keys_arrive(variant: aot.Variant) -> None:
    compiled: Any = aot.compile_variant(variant)
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async" in ptx
    assert "griddepcontrol.wait" in ptx
    assert compiled.metadata.shared <= SHARED_KB * 1024
    assert not compiled.metadata.global_scratch_size


def test_no_gpu_but_sm_90_has_them() -> None:
    for sm in (80, 89, 100):
        names = {each.spec.kernel.__name__ for each in aot.variants(sm)}
        assert names
        assert not names & {"shared_prefix_kernel", "cut_prefix_kernel"}
