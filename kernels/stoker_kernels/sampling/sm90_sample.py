"""`sample` of bf16 logits for SM 9.0 in one launch: host side of csrc/sm90_sample.

A cluster of CTAs takes a row, reads it once and keeps it in shared memory; vocabularies too large for that go to the
Triton kernels, which give the same tokens.
Invariants: nothing is allocated but the result; the launch depends on the number of rows and the vocabulary alone.
Knows nothing of dispatch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import HOPPER_SHARED
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.sampling import triton_sampling
from stoker_kernels.sampling.state import MAX_BIAS, SamplingState

STEM, ARCH = "sm90_sample", "sm_90a"
THREADS = 512
# CTAs a row: all that SMs hold for few rows, else the fewest that hold a row, whose bins the first CTA adds up alone.
FEW_ROWS, MOST_CTAS, LEAST_CTAS = 16, 8, 4
VECTOR = 8  # ids that a thread takes at a time
STATE_BYTES = 39_120  # SampleShared of csrc/sample_state.cuh


class SampleArguments(ctypes.Structure):
    """SampleArguments of csrc/sample_state.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "logits", "row_slots", "positions", "fields", "bias_ids", "bias_values", "bias_until", "counts",
            "bitmask", "out",
        )),
        *((name, ctypes.c_int) for name in ("vocab", "span", "most_bias")),
    ]  # fmt: skip


def span_of(vocab: int, cluster: int) -> int:
    """The ids that a CTA takes: a multiple of VECTOR, so that its vectors lie as the row's do."""
    return -(-vocab // (cluster * VECTOR)) * VECTOR


def shared_bytes(vocab: int, cluster: int, adjust: bool) -> int:
    """Dynamic shared memory: what a CTA keeps besides, and its values, bf16 or, adjusted, fp32."""
    return STATE_BYTES + span_of(vocab, cluster) * (4 if adjust else 2)


def cluster_for(rows: int, vocab: int, adjust: bool) -> int | None:
    """The CTAs that take a row together; None where no cluster holds a row of this vocabulary."""
    sizes = (MOST_CTAS,) if rows <= FEW_ROWS else (LEAST_CTAS, MOST_CTAS)
    return next((size for size in sizes if shared_bytes(vocab, size, adjust) <= HOPPER_SHARED), None)


def sample_arguments(
    logits: Tensor,
    state: SamplingState,
    row_slots: Tensor,
    positions: Tensor,
    bitmask: Tensor | None,
    out: Tensor,
    cluster: int,
) -> SampleArguments:
    """What the kernel reads and writes."""
    tensors = (logits, row_slots, positions, *state.adjustments)
    mask = None if bitmask is None else bitmask.data_ptr()
    vocab = logits.shape[1]
    return SampleArguments(
        *(tensor.data_ptr() for tensor in tensors), mask, out.data_ptr(), vocab, span_of(vocab, cluster), MAX_BIAS
    )


def sample(
    logits: Tensor,
    state: SamplingState,
    row_slots: Tensor,
    positions: Tensor,
    *,
    adjust: bool = True,
    bitmask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`sampling.sample` on SM 9.0."""
    (rows, vocab), device = logits.shape, logits.device
    cluster = cluster_for(rows, vocab, adjust)
    if cluster is None:
        return triton_sampling.sample(logits, state, row_slots, positions, adjust=adjust, bitmask=bitmask, out=out)
    triton_sampling.check_shape(logits, state)
    out = torch.empty(rows, dtype=torch.int32, device=device) if out is None else out
    if rows > 0:
        name = "sm90_bf16_sample_adjusted" if adjust else "sm90_bf16_sample"
        shared = shared_bytes(vocab, cluster, adjust)
        chosen = cuda.kernel(STEM, ARCH, name, shared, THREADS, device.index or 0)
        arguments = sample_arguments(logits, state, row_slots, positions, bitmask, out, cluster)
        cuda.launch(chosen, rows * cluster, [arguments], device, pdl=pdl_on(device), cluster=cluster)
    return out
