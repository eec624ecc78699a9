"""Weights in the order in which this processor's products read them, on pages that it finds quickly.

Invariants: what has no such order is left as it is. Knows nothing of files, nor of where the weights rest.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import replace

from torch import Tensor

from stoker_kernels.block_gemm import pack as pack_blocks
from stoker_kernels.gemm import pack
from stoker_kernels.lane_gemm import pack_lanes
from stoker_kernels.quant import AnyWeight, BlockWeight, Fp4Weight, IntegerWeight
from stoker_runtime.models.decoder_weights import DecoderWeights

LARGE_PAGE = 2 << 20


def in_large_pages(storage: Tensor) -> Tensor:
    """The same memory, which nothing was written to yet, asked of the system in pages of 2 MiB.

    A step reads all weights once: in pages of 4 KiB that is one look into the page table for each 64 lines, and in a
    virtual machine each look is several. A system that has no such pages gives others.
    """
    first = -(-storage.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    size = (storage.data_ptr() + storage.nbytes) // LARGE_PAGE * LARGE_PAGE - first
    if size > 0 and sys.platform == "linux" and storage.device.type == "cpu":
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        madvise(first, size, mmap.MADV_HUGEPAGE)
    return storage


def packed_for_cpu(weights: DecoderWeights) -> DecoderWeights:
    """The same weights, the matrices in the order in which this processor's products read them, if it has one.

    Dense matrices in bf16 take as many bytes again and make a step half as long; blocks, and integers and floats of few
    bits, are packed where they lie, so that `weights` must not be read again.
    """

    def packed(weight: AnyWeight) -> AnyWeight:
        if isinstance(weight, BlockWeight):
            return pack_blocks(weight)
        if isinstance(weight, IntegerWeight | Fp4Weight):
            return pack_lanes(weight)
        return pack(weight)

    layers = tuple(
        replace(
            each,
            qkv=each.qkv and packed(each.qkv),
            latent=each.latent and replace(each.latent, q_b=each.latent.q_b and packed(each.latent.q_b)),
            state=each.state and replace(each.state, gates=each.state.gates and packed(each.state.gates)),
            output=each.output and packed(each.output),
            gate_up=each.gate_up and packed(each.gate_up),
            down=each.down and packed(each.down),
        )
        for each in weights.layers
    )
    weights = replace(weights, fuse=weights.fuse and packed(weights.fuse))
    head = packed(weights.head) if weights.head.out_features else weights.head
    if isinstance(head, BlockWeight) and weights.embed is weights.head:
        return replace(weights, layers=layers, head=head, embed=head)
    return replace(weights, layers=layers, head=head)
