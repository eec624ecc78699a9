"""What a step of decode rows looks like to the CUDA kernels: its shares, and what the kernel before it writes.

Knows nothing of kernels: the tests launch them.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass

from stoker_kernels.attention_batches import AttentionBatch


@dataclass(frozen=True)
class Plan:
    """A way to cut the line of units: `per_cta` units a CTA, in pieces of single streams or anywhere.

    `tail` > 0: `per_cta` units for each of `ctas` CTAs, and shares of `tail` units of the rest. With a tail, or where
    `whole`, a stream belongs to the share that its first unit lies in.
    """

    per_cta: int
    pieces: bool = False
    window: int = 0
    idle: int = 2
    ctas: int = 0
    tail: int = 0
    whole: bool = False

    def shares(self, batch: AttentionBatch) -> list[list[int]]:
        """`[row, slot, head, block, units, len, per_cta, tail]` for each CTA, of the batch's decode rows."""
        line = []
        for row, (_, keys) in enumerate(batch.rows[: batch.meta.num_decodes]):
            first = max(0, keys - self.window) // 64 if self.window else 0
            for head in range(batch.k.shape[1]):
                units = max(-(-keys // 64) - first, 1)
                stream = [(row, head, first + i, keys) for i in range(units)]
                if self.pieces:
                    stream += [(row, head, -1, keys)] * (-units % self.per_cta)
                line += stream
        begins = [i * self.per_cta for i in range(self.ctas)] if self.tail else []
        begins += range(self.ctas * self.per_cta, len(line), self.tail or self.per_cta)
        cuts = [line[begin:end] for begin, end in itertools.pairwise([*begins, len(line)])]
        slots = batch.meta.seq_slots.tolist()
        shares = []
        for cut in cuts:
            row, head, block, keys = cut[0]
            shares.append([row, slots[row], head, block, sum(u[2] >= 0 for u in cut), keys,
                           0 if self.tail or self.whole else self.per_cta, int(self.tail > 0)])
        return shares + [[9999, -5, 0, 0, 0, 0, 0, 0]] * self.idle


class Region(ctypes.Structure):
    """emulator::Region."""

    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_int64))


def regions_of_this_step(batch: AttentionBatch) -> ctypes.Array[Region]:
    """What the kernel before writes: all queries, and the keys and values of each row's query tokens."""
    found = [Region(batch.q.data_ptr(), batch.q.nbytes)]
    for (count, keys), slot in zip(batch.rows, batch.meta.seq_slots.tolist(), strict=True):
        for key in range(max(keys - count, 0), keys):
            page, token = batch.meta.page_table[slot, key // batch.k.shape[2]], key % batch.k.shape[2]
            heads = (cache[page, head, token] for cache in (batch.k, batch.v) for head in range(cache.shape[1]))
            found += [Region(row.data_ptr(), row.nbytes) for row in heads]
    return (Region * len(found))(*found)
