"""Compiles every Triton kernel of the package with no GPU present: `python -m stoker_kernels.aot --sm 90 --out DIR`.

Each kernel of each spec in the registry becomes a cubin and a JSON file beside it: the entry's name, threads, shared
memory, scratch, the order of its arguments, and the constants it was compiled with.

Invariants: a file's name is the kernel's and a hash of all that shaped it, so that a second run writes the same
files; no path of the building machine is in the result.
Knows nothing of how the results are loaded.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker_kernels.aot_registry import SMS, AotSpec, specs
from stoker_kernels.pdl import PDL_MIN_SM

# The modules that register kernels when they are imported.
KERNEL_MODULES = (
    "activation_triton",
    "attention_aot",
    "embedding_triton",
    "gemm_fp8_triton",
    "logprobs_triton",
    "norm_triton",
    "quant_triton",
    "ragged_triton",
    "rope_triton",
    "sampling_triton",
    "slots_triton",
)
POINTER_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Variant:
    """One cubin to be: a spec with one set of constants, for one SM."""

    spec: AotSpec
    constants: Mapping[str, Any]
    sm: int

    @property
    def name(self) -> str:
        """`kernel-0123456789ab`: the same for the same kernel, types, constants and options."""
        shaped_by = [self.sm, self.spec.signature, self.constants, self.spec.options, self.spec.kernel.cache_key]
        digest = hashlib.sha256(json.dumps(shaped_by, sort_keys=True, default=str).encode()).hexdigest()
        return f"{self.spec.kernel.__name__.strip('_')}-{digest[:12]}"


def variants(sm: int, *, compact: bool = False) -> Iterator[Variant]:
    """Everything to compile for an SM; with `compact` what stands for the rest in a quick test."""
    for module in KERNEL_MODULES:
        importlib.import_module(f"stoker_kernels.{module}")
    for spec in specs():
        if not spec.min_sm <= sm <= spec.max_sm or (compact and not spec.compact):
            continue
        for constants in spec.constants[: 1 if compact else None]:
            yield Variant(spec, {**constants, **_pdl_choice(spec, sm)}, sm)


def _pdl_choice(spec: AotSpec, sm: int) -> dict[str, bool]:
    """Programmatic launch wherever the device has it: that is how the executor launches there."""
    return {"LAUNCH_PDL": sm >= PDL_MIN_SM} if "LAUNCH_PDL" in spec.kernel.arg_names else {}


def compile_variant(variant: Variant) -> Any:
    """Compile one variant → Triton's compiled kernel (`asm["cubin"]`, `metadata`).

    Raises:
        ValueError: the spec leaves an argument of the kernel without a type and without a constant.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.spec.kernel.arg_names
    missing = [name for name in names if name not in variant.spec.signature and name not in variant.constants]
    if missing:
        raise ValueError(f"{variant.spec.kernel.__name__} has arguments without a type: {', '.join(missing)}")
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        kind = "constexpr" if name in variant.constants else variant.spec.signature[name]
        base, _, mark = kind.partition(":")
        signature[name] = base
        if base.startswith("*") or mark:
            attributes[(index,)] = [["tt.divisibility", int(mark or POINTER_ALIGNMENT)]]
    source = ASTSource(variant.spec.kernel, signature, dict(variant.constants), attributes)
    options = dict(variant.spec.options)
    if variant.constants.get("LAUNCH_PDL"):
        options["launch_pdl"] = True
    return triton.compile(source, target=GPUTarget("cuda", variant.sm, 32), options=options)


def write_variant(variant: Variant, folder: Path) -> Path:
    """Compile one variant and write `NAME.cubin` and `NAME.json`; a file already there is kept. Returns the cubin."""
    cubin = folder / f"{variant.name}.cubin"
    description = cubin.with_suffix(".json")
    if cubin.exists() and description.exists():
        return cubin
    compiled = compile_variant(variant)
    metadata = compiled.metadata
    record = {
        "entry": metadata.name,
        "sm": variant.sm,
        "threads": metadata.num_warps * 32,
        "shared": metadata.shared,
        "global_scratch": metadata.global_scratch_size,
        "profile_scratch": metadata.profile_scratch_size,
        "launch_pdl": metadata.launch_pdl,
        "arguments": {
            name: variant.spec.signature[name]
            for name in variant.spec.kernel.arg_names
            if name not in variant.constants
        },
        "constants": dict(variant.constants),
    }
    cubin.write_bytes(compiled.asm["cubin"])
    description.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return cubin


def main(arguments: list[str] | None = None) -> int:
    """The command: compile for the SMs named and say how many, how large and how long."""
    parser = argparse.ArgumentParser(prog="python -m stoker_kernels.aot", description="Compile every Triton kernel.")
    parser.add_argument("--sm", type=int, action="append", choices=SMS, help="an SM, as 90; repeatable (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to, one folder an SM")
    parser.add_argument("--compact", action="store_true", help="only the specs of the quick test")
    options = parser.parse_args(arguments)
    for sm in options.sm or SMS:
        folder = options.out / f"sm_{sm}"
        folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        files = [write_variant(variant, folder) for variant in variants(sm, compact=options.compact)]
        size = sum(file.stat().st_size for file in files)
        seconds = time.monotonic() - start
        print(f"sm_{sm}: {len(files)} kernels, {size / 1e6:.1f} MB, {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
