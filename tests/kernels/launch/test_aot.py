"""Every kernel compiles for every SM with no GPU present, and uses what its SM is meant to have."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests import matrix
from triton.runtime.jit import JITFunction

import stoker_kernels
from stoker_kernels.launch import aot
from stoker_kernels.launch.aot_index import INDEX
from stoker_kernels.launch.aot_registry import SMS, AotSpec, register_aot, specs
from stoker_kernels.launch.chip import chip_of

EXACT = {"tile_max_kernel", "tile_mass_kernel", "choose_kernel", "typical_kernel"}
# Launched after the events of other streams, and so without programmatic launch.
PLAIN = {"copy_pages_kernel"}
LOOKED_INTO = {*EXACT, *PLAIN, "rms_norm_kernel"}


# What multiplies matrices.
PRODUCTS = re.compile(r"^(gate_up|down|latent_(decode|context|prefill)|(integer|fp4|int8|plane)_linear|lora_shrink)_")


def _mine(sm: int) -> Iterator[aot.Variant]:
    """The quick set without attention's kernels, which have a test of their own."""
    return (variant for variant in aot.variants(sm, compact=True) if "attention" not in variant.spec.kernel.__module__)


Compiled = Callable[[int], dict[str, Any]]


@pytest.fixture(scope="module")
def compiled_for(request: pytest.FixtureRequest) -> Compiled:
    """Of each SM a sixth, drawn as of a matrix, for all take ten minutes; of SM 9.0 what tests look into besides."""

    @cache
    def compiled(sm: int) -> dict[str, Any]:
        mine = {f"{sm} {each.name}": each for each in _mine(sm)}
        looked_into = [name for name, each in mine.items() if sm == 90 and kernel_of(each.name) in LOOKED_INTO]
        names = {*matrix.drawn(request.config, mine, len(mine) // 6), *looked_into}
        return {each.name: aot.compile_variant(each) for name, each in mine.items() if name in names}

    return compiled


def kernel_of(variant: str) -> str:
    return variant.rpartition("-")[0]


@pytest.mark.parametrize("sm", SMS)
def test_it_compiles_for(sm: int, compiled_for: Compiled) -> None:
    compiled = compiled_for(sm)
    assert len(compiled) > 5
    for name, kernel in compiled.items():
        assert kernel.asm["cubin"].startswith(b"\x7fELF"), name
        ptx = kernel.asm["ptx"]
        waits = "griddepcontrol.wait" in ptx
        plain = kernel_of(name) in PLAIN
        assert waits == (chip_of(sm).pdl and not plain), f"{name} on sm_{sm}"
        assert kernel.metadata.shared <= chip_of(sm).shared_bytes, f"{name} on sm_{sm}"
        assert sm == 90 or "wgmma" not in ptx, f"{name} on sm_{sm}"
        assert not re.search(r"cp\.async\.bulk|tensormap", ptx), f"{name} on sm_{sm}"
        if 80 <= sm < 90 and PRODUCTS.search(name):
            assert "mma.sync" in ptx, f"{name} on sm_{sm}"


def test_exact_kernels_contain_no_fused_multiply_add(compiled_for: Compiled) -> None:
    checked = 0
    for name, kernel in compiled_for(90).items():
        if kernel_of(name) in EXACT:
            assert "fma.rn" not in kernel.asm["ptx"], name
            checked += 1
    assert checked >= len(EXACT)


def test_wide_loads_on_the_hot_path(compiled_for: Compiled) -> None:
    pages = next(kernel for name, kernel in compiled_for(90).items() if name.startswith("copy_pages"))
    assert "ld.global.v2.b64" in pages.asm["ptx"]
    norm = next(kernel for name, kernel in compiled_for(90).items() if name.startswith("rms_norm"))
    assert "ld.global.v4.b32" in norm.asm["ptx"]


def test_every_kernel_of_the_package_is_registered() -> None:
    list(aot.variants(90))
    registered, found = {id(spec.kernel) for spec in specs()}, 0
    for path in Path(stoker_kernels.__file__).parent.glob("*/*.py"):
        if "import triton" not in path.read_text():
            continue
        module = importlib.import_module(f"stoker_kernels.{path.parent.name}.{path.stem}")
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                assert id(value) in registered, f"{path.stem}.{name} is not in the registry"
                found += 1
    assert found >= 20


def test_an_argument_without_a_type_is_named() -> None:
    spec = next(spec for spec in specs() if spec.kernel.__name__ == "best_tile_kernel")
    short = AotSpec(spec.kernel, {"tile_max": "*fp32"}, ({},))
    with pytest.raises(ValueError, match="tile_arg, out, tiles"):
        aot.compile_variant(aot.Variant(short, {"TILES": 64, "LAUNCH_PDL": False}, 90))


def test_files_are_the_same_at_every_run(tmp_path: Path) -> None:
    variant = next(v for v in _mine(80) if v.spec.kernel.__name__ == "best_tile_kernel")
    cubin = aot.write_variant(variant, tmp_path)
    first = (cubin.read_bytes(), cubin.with_suffix(".json").read_text())
    cubin.unlink()
    assert aot.write_variant(variant, tmp_path) == cubin
    assert (cubin.read_bytes(), cubin.with_suffix(".json").read_text()) == first
    record = json.loads(first[1])
    assert record["entry"] == "best_tile_kernel"
    assert (record["threads"], record["launch_pdl"], record["constants"]["TILES"]) == (32, False, 64)
    assert str(tmp_path) not in first[1]


def test_the_index_keeps_the_order_in_which_a_kernel_takes_its_arguments(tmp_path: Path) -> None:
    variant = next(v for v in _mine(80) if v.spec.kernel.__name__ == "best_tile_kernel")
    aot.write_all([variant], tmp_path, jobs=1)
    (cubin,) = json.loads((tmp_path / INDEX).read_text())
    assert [*cubin["arguments"]] == [name for name in variant.spec.kernel.arg_names if name not in cubin["constants"]]
    assert [*cubin["arguments"]] != sorted(cubin["arguments"])


def test_the_registry_keeps_what_it_is_given() -> None:
    before = len(specs())
    register_aot(print, {"x": "*fp32"}, [{"A": 1}], options={"num_warps": 2}, min_sm=1000)
    added = specs()[-1]
    assert len(specs()) == before + 1
    assert (dict(added.signature), added.constants, added.min_sm) == ({"x": "*fp32"}, ({"A": 1},), 1000)
