"""Weights in the order in which this processor's products read them.

Invariants: what has no such order is left as it is. Knows nothing of files, nor of where the weights rest.
"""

from __future__ import annotations

from dataclasses import replace

from stoker_kernels.block_gemm import pack as pack_blocks
from stoker_kernels.gemm import pack
from stoker_kernels.lane_gemm import pack_lanes
from stoker_kernels.quant import AnyWeight, BlockWeight, Fp4Weight, IntegerWeight
from stoker_runtime.models.decoder_weights import DecoderWeights


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
