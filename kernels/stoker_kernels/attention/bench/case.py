"""One timed batch on the GPU: random queries and caches, page tables that keep the L2 cold, the right answer.

Invariants: the calls of a rotation read disjoint pages, together more than the L2 holds.
Knows nothing of configurations.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from stoker_kernels.attention.bench.works import Work
from stoker_kernels.attention.inputs import Inputs
from stoker_kernels.attention.meta import AttentionMeta, AttentionWorkspace
from stoker_kernels.attention.reference import reference_attention

L2_BYTES = 160e6  # pages a rotation covers: three times an H200's L2


class Case:
    """A batch on the GPU, with enough disjoint page sets to keep the L2 cold."""

    def __init__(self, work: Work, page: int, fp8: bool, workspace: AttentionWorkspace, rotate: bool = True):
        heads = work.heads
        self.work, self.fp8 = work, fp8
        per_row = [(keys + page - 1) // page for _, keys in work.rows]
        self.kv_bytes = sum(k for _, k in work.rows) * heads.kv * heads.dim * 2 * (1 if fp8 else 2)
        self.rotations = max(2, min(256, int(L2_BYTES / self.kv_bytes) + 1)) if rotate else 1
        pages = sum(per_row) * self.rotations
        shape = (pages, heads.kv, page, heads.dim)
        self.k, self.v = (_random_cache(shape, fp8) for _ in range(2))
        self.scales = [torch.rand(heads.kv, device="cuda") + 0.5 for _ in range(2)] if fp8 else [None, None]
        tokens = [q for q, _ in work.rows]
        self.q = torch.randn(sum(tokens), heads.q, heads.dim, device="cuda", dtype=torch.bfloat16)
        order = torch.randperm(pages, device="cuda").int()
        starts = torch.tensor([0, *itertools.accumulate(tokens)], device="cuda").int()
        lengths = torch.tensor([k for _, k in work.rows], device="cuda").int()
        self.metas = []
        for index in range(self.rotations):
            table = torch.zeros(len(tokens), max(per_row), dtype=torch.int32, device="cuda")
            offset = index * sum(per_row)
            filled = torch.arange(max(per_row), device="cuda") < torch.tensor(per_row, device="cuda")[:, None]
            table[filled] = order[offset : offset + sum(per_row)]
            slots = torch.arange(len(tokens), device="cuda").int()
            self.metas.append(
                AttentionMeta(
                    table, slots, starts, lengths, work.decodes, max(tokens), max(k for _, k in work.rows), workspace
                )
            )
        self.out = torch.empty_like(self.q)

    def inputs(self) -> Inputs:
        """The op's arguments."""
        k, v = (t.view(torch.uint16) if self.fp8 else t for t in (self.k, self.v))
        scale = self.work.heads.dim**-0.5
        return Inputs(self.q, k, v, self.out, self.scales[0], self.scales[1], None, scale, 0, 0.0, self.fp8)

    def reference(self) -> Tensor:
        """The right answer, in fp32."""
        return reference_attention(
            self.q.float(),
            self.k,
            self.v,
            self.metas[0],
            scale=self.work.heads.dim**-0.5,
            k_scale=self.scales[0],
            v_scale=self.scales[1],
        )


def _random_cache(shape: tuple[int, ...], fp8: bool) -> Tensor:
    values = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    return values.to(torch.float8_e4m3fn) if fp8 else values
