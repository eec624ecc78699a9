"""What a launch of attention is given: the op's tensors and scalars, as the kernels take them, checked.

Invariants: what `refuse_misread` lets pass, every kernel of this folder reads as it is meant.
Knows nothing of kernels, nor of which one runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.attention.meta import AttentionMeta, ResultsBefore


@dataclass(frozen=True, slots=True)
class BlockPattern:
    """Which blocks of `block` keys a query sees (a power of two from 16 on): the last `local` ones, its own included,
    and every `stride`-th, whose place moves by `step` blocks from a head to the next, so that heads see others' gaps.

    Query head h sees block b of those before wherever (b + 1 + (h + first_head) · step) is a multiple of `stride`.
    """

    block: int
    local: int
    stride: int
    step: int
    first_head: int = 0

    def sees(self, heads: Tensor, query_blocks: Tensor, key_blocks: Tensor) -> Tensor:
        """Whether query heads see blocks of keys from blocks of queries, of shapes that broadcast; causality aside."""
        strided = (key_blocks + 1 + (heads + self.first_head) * self.step) % self.stride == 0
        return (query_blocks - key_blocks < self.local) | strided

    def problem(self, heads: int) -> str | None:
        """Why no kernel computes it for so many query heads; None where they do."""
        if self.block < 16 or self.block & (self.block - 1):
            return f"blocks of {self.block} keys are not a power of two from 16 on"
        if min(self.local, self.stride) < 1 or self.first_head < 0:
            return f"{self.local} local blocks and a stride of {self.stride} are not positive"
        if self.step < 0 or (self.step > 1 and self.step * heads > self.stride):
            return f"a step of {self.step} blocks brings {heads} heads beyond a stride of {self.stride}"
        return None


@dataclass(frozen=True, slots=True)
class Inputs:
    """The op's tensors and scalars; caches of e4m3 are viewed as uint16 pairs."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    sinks: Tensor | None
    scale: float
    window: int
    softcap: float
    fp8: bool
    slopes: Tensor | None = None
    pattern: BlockPattern | None = None
    before: ResultsBefore | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return int(self.q.shape[1] // self.k_cache.shape[1])

    @property
    def page_shift(self) -> int:
        """log2 of a page's tokens."""
        return int(self.k_cache.shape[2]).bit_length() - 1

    @property
    def kv_dtype(self) -> torch.dtype:
        """What the cache holds, whatever it is viewed as."""
        return torch.float8_e4m3fn if self.fp8 else self.k_cache.dtype

    @property
    def kv_bytes(self) -> int:
        """Of a cached element."""
        return self.kv_dtype.itemsize


def refuse_misread(inputs: Inputs, meta: AttentionMeta) -> None:
    """Raise ValueError for inputs the kernels would misread."""
    q, k, v, out = inputs.q, inputs.k_cache, inputs.v_cache, inputs.out
    page = k.shape[2]
    checks = [
        (q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} query heads do not divide into {k.shape[1]} KV heads"),
        (k.stride() == v.stride() and k.stride(3) == 1, "k_cache and v_cache need equal strides, the last of them 1"),
        (q.stride(2) == 1 and q.stride(1) == q.shape[2], "q's heads must be contiguous in a token"),
        (out.stride(2) == 1 and out.stride(1) == q.shape[2], "out's heads must be contiguous in a token"),
        (page & (page - 1) == 0 and page >= 16, f"page size {page} is not a power of two from 16 on"),
        (inputs.fp8 == (inputs.k_scale is not None), "an e4m3 cache needs k_scale, and no other takes it"),
        (inputs.fp8 == (inputs.v_scale is not None), "an e4m3 cache needs v_scale, and no other takes it"),
        (inputs.fp8 or k.dtype == q.dtype, f"q is {q.dtype} but the cache {k.dtype}"),
        (
            inputs.slopes is None or (inputs.slopes.shape == q.shape[1:2] and inputs.slopes.dtype is torch.float32),
            f"slopes are fp32, one for each of {q.shape[1]} query heads",
        ),
        (
            meta.planned_window in (None, 0) or 0 < inputs.window <= (meta.planned_window or 0),
            f"the step was planned for window {meta.planned_window}, narrower than {inputs.window}",
        ),
    ]
    if (before := inputs.before) is not None:
        plain = inputs.window == 0 and inputs.softcap == 0.0 and inputs.sinks is None and inputs.slopes is None
        shape = (before.parts, meta.num_decodes, *q.shape[1:])
        checks += [
            (plain and inputs.pattern is None, "results of keys before go with no window, soft-cap, sinks or pattern"),
            (len(q) == meta.num_decodes, "results of keys before are of decode rows alone"),
            (before.values.shape == shape and before.lse.shape == shape[:3], f"results of keys before are {shape}"),
        ]
    if inputs.pattern is not None and (problem := inputs.pattern.problem(q.shape[1])) is not None:
        raise ValueError(f"paged_attention: {problem}")
    for good, message in checks:
        if not good:
            raise ValueError(f"paged_attention: {message}")


def inputs_of(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    pattern: BlockPattern | None = None,
    out: Tensor | None = None,
    before: ResultsBefore | None = None,
) -> Inputs:
    """What a GPU's kernels read of the op's arguments; without `out` new memory for it. Raises as `refuse_misread`.

    `before`: what a step of decode rows alone has attended of earlier keys, which the page table does not name.
    """
    out = torch.empty_like(q) if out is None else out
    fp8 = k_cache.dtype is torch.float8_e4m3fn
    if fp8:
        k_cache, v_cache = k_cache.view(torch.uint16), v_cache.view(torch.uint16)
    scales = (k_scale, v_scale, sinks)
    inputs = Inputs(q, k_cache, v_cache, out, *scales, scale, window, softcap, fp8, slopes, pattern, before)
    refuse_misread(inputs, meta)
    return inputs
