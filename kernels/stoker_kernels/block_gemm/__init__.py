"""Products with weights in the blocks of GGUF, and rows of such tables: `block_linear`, `block_rows`.

`csrc/cpu_blocks.c` unpacks and multiplies on a CPU (`cpu.py`, compiled by `launch/cc.py`); four formats have an order
of their own (`cpu_packed.py`), multiplied in bf16 by `csrc/cpu_packed.c` and in fp32 by `cpu_packed_floats.c`. For a
GPU blocks are brought into planes of bits (`planes.py`, by `store_planes`) and multiplied in Triton
(`triton_planes.py`), on Hopper in CUDA for few tokens (`sm90_few.py`) and for many (`sm90_wide.py`), or for prompts
decoded there (`sm90_rows.py`) and multiplied as dense weights (`decoded.py`); `plane_choose.py` says how many tokens go
which way. `reference.py` is the
oracle of all.
`encode.py` rounds matrices to Q8_0 and Q4_K.
Must never know: files, models. A new format: `quant/block_weight.py` and `quant/block_planes.py`, `fields.py`, and
KINDS of cpu_blocks.c.
"""

from stoker_kernels.block_gemm.cpu_packed import bf16_refusal as packing_bf16_refusal
from stoker_kernels.block_gemm.cpu_packed import pack, packs
from stoker_kernels.block_gemm.cpu_packed import refusal as packing_refusal
from stoker_kernels.block_gemm.decoded import decode_rows, decodes, part_rows
from stoker_kernels.block_gemm.encode import encode_blocks
from stoker_kernels.block_gemm.op import block_linear, block_rows
from stoker_kernels.block_gemm.plane_choose import silu_mul as planes_silu_mul
from stoker_kernels.block_gemm.planes import store_planes
from stoker_kernels.block_gemm.reference import decode_blocks, decode_piece, plain_rows
from stoker_kernels.block_gemm.sm90_rows import device_refusal as decoding_refusal

__all__ = [
    "block_linear",
    "block_rows",
    "decode_blocks",
    "decode_piece",
    "decode_rows",
    "decodes",
    "decoding_refusal",
    "encode_blocks",
    "pack",
    "packing_bf16_refusal",
    "packing_refusal",
    "packs",
    "part_rows",
    "plain_rows",
    "planes_silu_mul",
    "store_planes",
]
