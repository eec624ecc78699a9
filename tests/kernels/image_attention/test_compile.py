"""The kernel of images compiled with no GPU: it builds for each SM, fits, multiplies on tensor cores, and is found."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from tests.kernels.image_attention.drawn import FP8, Chunk, ImageStep, Rules, Shape, make_step
from tests.kernels.launch.test_chip import launches

from stoker_kernels.image_attention import launch, variants
from stoker_kernels.launch import aot, pdl
from stoker_kernels.launch.aot_index import Cubin, Index
from stoker_kernels.launch.aot_registry import SMS, AotSpec, specs
from stoker_kernels.launch.chip import chip_of

BF16 = torch.bfloat16
# Query heads and KV heads of Gemma 3's models with images, and the size of a head.
GEMMA = {"4b": (8, 4, 256), "12b": (16, 8, 256), "27b": (32, 16, 128)}
MINE = [spec for spec in specs() if spec.kernel is variants.image_kernel]


def name(spec: AotSpec) -> str:
    constants = spec.constants[0]
    flags = "-".join(flag.lower() for flag in ("EXACT", "WHOLE", "FP8", "WINDOW") if constants[flag])
    return f"sm{spec.min_sm}-{constants['BLOCK_D'] * (2 if constants['FP8'] else 1)}-{flags}"


def test_there_is_a_kernel_for_each_chip() -> None:
    assert {spec.min_sm for spec in MINE} == set(SMS)
    assert all(spec.min_sm == spec.max_sm for spec in MINE)


def variant(spec: AotSpec) -> aot.Variant:
    return aot.Variant(spec, {**spec.constants[0], "LAUNCH_PDL": chip_of(spec.min_sm).pdl}, spec.min_sm)


def described(one: aot.Variant) -> Cubin:
    """What the index would say of a variant."""
    kernel = one.spec.kernel
    return Cubin(
        one.name, kernel.identity, kernel.source, "", 0, 0, True, one.arguments, one.constants, one.spec.options
    )


@pytest.mark.parametrize("model", [*GEMMA, "other"])
@pytest.mark.parametrize("sm", [80, 90])
def test_what_gemma_launches_is_compiled_ahead(sm: int, model: str) -> None:
    """With any page size, with a window and without, with either cache; and heads of another size, of all in parts."""
    index = Index(Path(), [described(variant(spec)) for spec in MINE if spec.min_sm == sm])
    q_heads, kv_heads, dim = GEMMA.get(model, (6, 2, 16 * random.randint(1, 15)))
    for page, window, cache, parts in itertools.product((16, 32, 64, 128), (0, 512), (BF16, FP8), (1, 2)):
        shape = Shape(page, kv_heads // parts, q_heads // kv_heads, dim, cache, BF16)
        step = make_step(shape, [Chunk(4, 40, ((5, 33),))], Rules(window))

        def attend(pick: random.Random, sm: int, step: ImageStep = step) -> None:
            step.run(launch.image_attention)

        pdl.enable_pdl(True)
        try:
            ((_, wanted),) = launches(attend, sm, seed=1)
        finally:
            pdl.enable_pdl(False)
        assert index.find(wanted) is not None, index.reason(wanted)


@pytest.mark.matrix(take=8)
@pytest.mark.parametrize("spec", MINE, ids=name)
def test_it_compiles_and_fits(spec: AotSpec) -> None:
    sm = spec.min_sm
    compiled = aot.compile_variant(variant(spec))
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.shared <= chip_of(sm).shared_bytes
    assert ("griddepcontrol.wait" in ptx) == chip_of(sm).pdl
    assert ("wgmma" in ptx) == (sm == 90)
    if 80 <= sm < 90:
        assert "mma.sync" in ptx
