"""A step of decode rows as the CUDA kernels see it: its shares, its arguments, what the kernel before it writes.

Knows nothing of kernels: the tests name them.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tests.kernels.attention.batches import AttentionBatch
from tests.kernels.emulator.build import cache_maps

from stoker_kernels.attention.sm90_decode import BOX_ROWS, LOG2E, DecodeArguments


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


@dataclass(frozen=True)
class DecodeStep:
    """A step's arguments, and the tensors that they point to."""

    batch: AttentionBatch
    arguments: DecodeArguments
    out: torch.Tensor
    shares: torch.Tensor
    tickets: torch.Tensor
    arrivals: torch.Tensor
    scratch: tuple[torch.Tensor, ...]

    def launch(self, kernel: Callable[..., None], ctas: int, seed: int, arguments: ctypes.Structure) -> torch.Tensor:
        """The output of a kernel, which leaves its counters at zero."""
        batch, written = self.batch, regions_of_this_step(self.batch)
        maps = cache_maps(batch, self.arguments.box_rows)
        by_address = (ctypes.byref(item) for item in (*maps, arguments))
        fp8 = batch.k.dtype is torch.float8_e4m3fn
        kernel(fp8, ctas, seed, *by_address, written, len(written), ctypes.c_int64(self.out.nbytes))
        assert not self.arrivals.any()
        assert not self.tickets.any()
        return self.out


def decode_step(
    batch: AttentionBatch,
    plan: Plan,
    *,
    stages: int = 3,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    settled: bool = True,
    before: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> DecodeStep:
    """The decode rows of a batch cut by `plan`, with poisoned results; without decode rows there are no shares.

    `before` are the values and the log-sum-exp of `ResultsBefore`.
    """
    _, kv_heads, page, dim = batch.k.shape
    group = batch.q.shape[1] // kv_heads
    m = batch.meta
    shares = torch.tensor(plan.shares(batch) or [[0] * 8], dtype=torch.int32)
    out = torch.full_like(batch.q, float("nan"))
    partial = torch.full((2 * len(shares), group, dim), float("nan"))
    lse = torch.full((2 * len(shares), group), float("nan"))
    tickets = torch.zeros(3, dtype=torch.int32)
    arrivals = torch.zeros(len(batch.rows), kv_heads, dtype=torch.int32)
    tensors = (out, batch.q, m.page_table, m.seq_lens, m.seq_slots, shares, tickets, partial, lse, arrivals,
               batch.k_scale, batch.v_scale, sinks, *(before or (None, None)))  # fmt: skip
    arguments = DecodeArguments(
        *(None if t is None else t.data_ptr() for t in tensors),
        batch.scale * LOG2E, softcap,
        window, plan.window, m.num_decodes, kv_heads, group, batch.q.stride(0), out.stride(0), m.page_table.stride(0),
        page.bit_length() - 1, kv_heads * page, page, min(BOX_ROWS, page), stages, len(shares) if m.num_decodes else 0,
        settled, len(before[0]) if before else 0, m.fresh,
    )  # fmt: skip
    return DecodeStep(batch, arguments, out, shares, tickets, arrivals, (partial, lse))
