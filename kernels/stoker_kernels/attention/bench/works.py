"""What is timed: batches of rows, the shapes of decode, of chunks and of both that figures are given for.

Knows nothing of tensors.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heads:
    """One model's attention shape."""

    name: str
    q: int
    kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class Work:
    """One timed batch: rows of (query tokens, keys), of which the first `decodes` decode."""

    name: str
    heads: Heads
    rows: tuple[tuple[int, int], ...]
    decodes: int = 0


QWEN_7B = Heads("7B", 28, 4, 128)
QWEN_06B = Heads("0.6B", 16, 8, 128)


def decode_works() -> list[Work]:
    """The decode shapes of the tables: prompts of 128 and outputs of 256 begin at 129 keys and end at 384."""
    works = [Work(f"7B 1x{n}", QWEN_7B, ((1, n),), 1) for n in (256, 1024, 8192)]
    for rows, keys in itertools.product((16, 64, 128, 256, 1024), (140, 256, 384)):
        works.append(Work(f"7B {rows}x{keys}", QWEN_7B, ((1, keys),) * rows, rows))
    works.append(Work("7B 32x8192", QWEN_7B, ((1, 8192),) * 32, 32))
    pick = random.Random(0)
    works.append(Work("0.6B 256 ragged", QWEN_06B, tuple((1, pick.randint(100, 2048)) for _ in range(256)), 256))
    return works


def mixed_works() -> list[Work]:
    """Chunks beside rows that decode, and small steps of chunks alone."""
    works = []
    for heads, rows, keys, chunk in (
        (QWEN_7B, 16, 1000, 128),
        (QWEN_7B, 64, 1000, 128),
        (QWEN_7B, 64, 1000, 512),
        (QWEN_7B, 64, 1000, 2048),
        (QWEN_7B, 256, 256, 512),
        (QWEN_7B, 64, 1000, 4096),
        (QWEN_06B, 64, 1000, 512),
        (QWEN_06B, 256, 1000, 2048),
    ):
        name = f"{heads.name} {rows}x{keys} + {chunk}"
        works.append(Work(name, heads, ((1, keys),) * rows + ((chunk, chunk),), rows))
    works.append(Work("7B 16x1000 + 512 at 16K", QWEN_7B, ((1, 1000),) * 16 + ((512, 16384),), 16))
    for rows, tokens in ((1, 128), (1, 512), (4, 128), (1, 2048), (8, 256)):
        works.append(Work(f"7B {rows}x{tokens}", QWEN_7B, ((tokens, tokens),) * rows))
    return works


def prefill_works() -> list[Work]:
    """Long, many, short, and a chunk with a long prefix."""
    return [
        Work("7B 1x8192", QWEN_7B, ((8192, 8192),)),
        Work("7B 64x1024", QWEN_7B, ((1024, 1024),) * 64),
        Work("7B 1x128", QWEN_7B, ((128, 128),)),
        Work("7B 1x2048 after 30K", QWEN_7B, ((2048, 32768),)),
    ]
