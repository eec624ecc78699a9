"""Tiles that were measured on this machine's GPU for weights that stand in no table: the file, and what it says.

A file belongs to one name of a GPU and one state of the kernels' sources, so neither another card nor another release
takes what it did not measure. Whoever starts calls `use_tuned` before the first product; without it `table` goes by its
rows and its rule alone.
Invariants: a file that cannot be read as a whole is named and ignored; the answer for a weight never changes once it
was given (`setdefault`).
Does not know: how tiles are measured (`bench.tune`), nor how a tile's text is read (`table`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoker_kernels.launch.aot_index import cache_folder

log = logging.getLogger(__name__)

LIMITS = (8, 16, 32, 64, 128, 192, 256, 512, 1024)
"""The most tokens that each of a weight's tiles is for; beyond the last, the rule decides."""
CUBLAS = "none"
FOLDER = Path(__file__).parent
DECIDING = ("small.py", "wide.py", "spread.py", "cluster_split.py", "tuned.py")


@dataclass(frozen=True, slots=True, order=True)
class GemmWeight:
    """A weight [n, k] in bf16, or e4m3 (`fp8`); `gated`: of gate and up, multiplied with their activation."""

    n: int
    k: int
    fp8: bool
    gated: bool

    def __str__(self) -> str:
        return f"{self.n}x{self.k}:{'e4m3' if self.fp8 else 'bf16'}{':gated' if self.gated else ''}"


Tiles = tuple[str, ...]
"""The tile of each of LIMITS, as `table.named` reads it; CUBLAS: cuBLAS, or for gate and up two kernels."""

_tiles: dict[GemmWeight, Tiles] = {}


def text_for(weight: GemmWeight, m: int) -> str | None:
    """The tile that was measured to be fastest for m tokens, or None where none was measured."""
    found = _tiles.get(weight)
    if found is None or m > LIMITS[-1]:
        return None
    return found[next(at for at, most in enumerate(LIMITS) if m <= most)]


def use_tuned(gpu: str) -> frozenset[GemmWeight]:
    """Take what was measured on GPUs of this name; the weights of which anything is known."""
    for weight, tiles in read_tuned(gpu).items():
        _tiles.setdefault(weight, tiles)
    return frozenset(_tiles)


def forget_tuned() -> None:
    """For tests, and for a measurement: the rule alone decides again."""
    _tiles.clear()


@functools.cache
def state_of_kernels() -> str:
    """A digest of what a measured time depends on: the kernels' sources and their host side."""
    digest = hashlib.sha256()
    for path in (*sorted((FOLDER / "csrc").iterdir()), *(FOLDER / name for name in DECIDING)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def tuned_file(gpu: str) -> Path:
    """Where what was measured on GPUs of this name is kept."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return cache_folder() / "gemm" / f"{name}-{state_of_kernels()}.json"


def read_tuned(gpu: str) -> dict[GemmWeight, Tiles]:
    """What the file of this GPU says; nothing where there is none, or where it is not what `write_tuned` writes."""
    file = tuned_file(gpu)
    try:
        given = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("gemm: %s is ignored, as it cannot be read: %s", file, error)
        return {}
    try:
        return _checked(given, gpu)
    except (KeyError, TypeError, ValueError) as error:
        log.warning("gemm: %s is ignored, as it does not hold measured tiles: %s", file, error)
        return {}


def write_tuned(gpu: str, found: Mapping[GemmWeight, Tiles]) -> Path:
    """Add `found` to the file of this GPU, which is replaced at once. Raises OSError."""
    file = tuned_file(gpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(weight), "tiles": list(tiles)} for weight, tiles in sorted({**read_tuned(gpu), **found}.items())]
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"gpu": gpu, "limits": LIMITS, "weights": rows}, indent=1) + "\n")
    partial.replace(file)
    return file


def _checked(given: Any, gpu: str) -> dict[GemmWeight, Tiles]:
    """Raises KeyError, TypeError or ValueError for what this version would not have written."""
    from stoker_kernels.gemm.table import named

    if given["gpu"] != gpu or tuple(given["limits"]) != LIMITS:
        raise ValueError(f"it is of {given['gpu']} for up to {given['limits']} tokens")
    found: dict[GemmWeight, Tiles] = {}
    for row in given["weights"]:
        weight = GemmWeight(*(row[name] for name in ("n", "k", "fp8", "gated")))
        kinds = tuple(type(each) for each in (weight.n, weight.k, weight.fp8, weight.gated))
        if kinds != (int, int, bool, bool) or len(row["tiles"]) != len(LIMITS):
            raise ValueError(f"{row} is no weight with {len(LIMITS)} tiles")
        for text, most in zip(row["tiles"], LIMITS, strict=True):
            named(text, weight.fp8, weight.gated, most)
        found[weight] = tuple(row["tiles"])
    return found
