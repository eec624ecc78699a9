"""Compiles every Triton kernel of the package with no GPU present.

`python -m stoker_kernels.launch.aot --sm 90 --out DIR` is the command.

Each kernel of each spec in the registry becomes a cubin and a JSON file beside it, which tells how to launch it and
what it was compiled for; `index.json` holds them all (`aot_index`).

Invariants: a file's name is the kernel's and a hash of all that shaped it, so that a second run writes the same
files; no path of the building machine is in the result.
Knows nothing of how the results are loaded.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoker_kernels.launch.aot_index import Cubin, aot_folder, sm_folder, split_type, write_index
from stoker_kernels.launch.aot_registry import SMS, AotSpec, specs
from stoker_kernels.launch.chip import chip_of

PACKAGE = Path(__file__).parents[1]


def kernel_modules() -> list[str]:
    """The modules that register kernels when they are imported: `OP/triton_*.py` and `OP/variants.py`, in order."""
    files = sorted([*PACKAGE.glob("*/triton_*.py"), *PACKAGE.glob("*/variants.py")])
    return [f"stoker_kernels.{path.parent.name}.{path.stem}" for path in files]


@dataclass(frozen=True, slots=True)
class Variant:
    """One cubin to be: a spec with one set of constants, for one SM."""

    spec: AotSpec
    constants: Mapping[str, Any]
    sm: int

    @property
    def name(self) -> str:
        """`kernel-0123456789ab`: the same for the same kernel, types, constants and options."""
        shaped_by = [self.sm, self.spec.signature, self.constants, self.spec.options, self.spec.kernel.source]
        digest = hashlib.sha256(json.dumps(shaped_by, sort_keys=True, default=str).encode()).hexdigest()
        return f"{self.spec.kernel.__name__.strip('_')}-{digest[:12]}"

    @property
    def arguments(self) -> dict[str, str]:
        """What a launch passes, in order: name → type."""
        names = (name for name in self.spec.kernel.arg_names if name not in self.constants)
        return {name: self.spec.signature[name] for name in names}


def variants(sm: int, *, compact: bool = False) -> Iterator[Variant]:
    """Everything to compile for an SM; with `compact` what stands for the rest in a quick test."""
    for module in kernel_modules():
        importlib.import_module(module)
    for spec in specs():
        if not spec.min_sm <= sm <= spec.max_sm or (compact and not spec.compact):
            continue
        for constants in spec.constants[: 1 if compact else None]:
            yield Variant(spec, {**constants, **_pdl_choice(spec, sm)}, sm)


def _pdl_choice(spec: AotSpec, sm: int) -> dict[str, bool]:
    """Programmatic launch wherever the device has it: that is how the executor launches there."""
    return {"LAUNCH_PDL": chip_of(sm).pdl} if "LAUNCH_PDL" in spec.kernel.arg_names else {}


def compile_variant(variant: Variant) -> Any:
    """Compile one variant → Triton's compiled kernel (`asm["cubin"]`, `metadata`).

    Raises:
        ValueError: the spec leaves an argument of the kernel without a type and without a constant.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # Two thirds of a cubin would be its PTX and line numbers, for debuggers.
    triton.knobs.compilation.disable_line_info = True

    names = variant.spec.kernel.arg_names
    missing = [name for name in names if name not in variant.spec.signature and name not in variant.constants]
    if missing:
        raise ValueError(f"{variant.spec.kernel.__name__} has arguments without a type: {', '.join(missing)}")
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        kind = "constexpr" if name in variant.constants else variant.spec.signature[name]
        signature[name], divisor = split_type(kind)
        if divisor > 1:
            attributes[(index,)] = [["tt.divisibility", divisor]]
    source = ASTSource(variant.spec.kernel, signature, dict(variant.constants), attributes)
    options = dict(variant.spec.options)
    if variant.constants.get("LAUNCH_PDL"):
        options["launch_pdl"] = True
    return triton.compile(source, target=GPUTarget("cuda", variant.sm, 32), options=options)


def write_variant(variant: Variant, folder: Path) -> Path:
    """Compile one variant and write `NAME.cubin` and `NAME.json`; a file already there is kept. Returns the cubin.

    Raises ValueError for a kernel that needs scratch memory, which the loader does not give, or more shared memory
    than a block has on its SM.
    """
    cubin = folder / f"{variant.name}.cubin"
    description = cubin.with_suffix(".json")
    if cubin.exists() and description.exists():
        return cubin
    compiled = compile_variant(variant)
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise ValueError(f"{metadata.name} needs scratch memory in global memory")
    room = chip_of(variant.sm).shared_bytes
    if metadata.shared > room:
        raise ValueError(
            f"{metadata.name} takes {metadata.shared} bytes of shared memory, of which a block on sm_{variant.sm} has "
            f"{room} ({variant.spec.options}, {dict(variant.constants)})"
        )
    record = Cubin(
        file=cubin.name,
        kernel=variant.spec.kernel.identity,
        source=variant.spec.kernel.source,
        entry=metadata.name,
        threads=metadata.num_warps * 32,
        shared=metadata.shared,
        launch_pdl=metadata.launch_pdl,
        arguments=variant.arguments,
        constants=dict(variant.constants),
        options=dict(variant.spec.options),
    )
    _write_whole(cubin, compiled.asm["cubin"])
    _write_whole(description, (json.dumps(asdict(record), indent=1) + "\n").encode())
    return cubin


def _write_whole(file: Path, content: bytes) -> None:
    """Write a file that other processes find whole or not at all."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}.partial")
    partial.write_bytes(content)
    partial.replace(file)


def write_all(wanted: Iterable[Variant], folder: Path, jobs: int) -> list[Path]:
    """Compile `wanted` in `jobs` processes, write the index of exactly those, and remove cubins of other sources."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(wanted)
    if jobs > 1:
        # Forked, because a variant holds functions: each process writes its share, and all find the rest written.
        context = multiprocessing.get_context("fork")
        shares = [context.Process(target=_write_share, args=(wanted[at::jobs], folder)) for at in range(jobs)]
        for share in shares:
            share.start()
        for share in shares:
            share.join()
        if any(share.exitcode for share in shares):
            raise RuntimeError("compiling failed; the messages above tell where")
    files = [write_variant(variant, folder) for variant in wanted]
    write_index(folder, (Cubin(**json.loads(file.with_suffix(".json").read_text())) for file in files))
    for stale in {*folder.glob("*.cubin")} - {*files}:
        stale.with_suffix(".json").unlink(missing_ok=True)
        stale.unlink()
    return files


def _write_share(share: list[Variant], folder: Path) -> None:
    for variant in share:
        write_variant(variant, folder)


def main(arguments: list[str] | None = None) -> int:
    """The command: compile for the SMs named and say how many, how large and how long."""
    parser = argparse.ArgumentParser("python -m stoker_kernels.launch.aot", description="Compile every Triton kernel.")
    parser.add_argument("--sm", type=int, action="append", choices=SMS, help="an SM, as 90; repeatable (default: all)")
    parser.add_argument(
        "--out", type=Path, default=aot_folder(), help="the folder to write to, one folder an SM (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    parser.add_argument("--compact", action="store_true", help="only the specs of the quick test")
    options = parser.parse_args(arguments)
    for sm in options.sm or SMS:
        start = time.monotonic()
        files = write_all(variants(sm, compact=options.compact), sm_folder(options.out, sm), options.jobs)
        size = sum(file.stat().st_size for file in files)
        seconds = time.monotonic() - start
        print(f"sm_{sm}: {len(files)} kernels, {size / 1e6:.1f} MB, {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
