"""Products with weights in the blocks of GGUF, and rows of such tables: `block_linear`, `block_rows`.

`csrc/cpu_blocks.c` unpacks and multiplies on a CPU (`cpu.py`, compiled by `launch/cc.py`). For a GPU blocks are
brought into planes of bits (`planes.py`, by `store_planes`) and multiplied in Triton (`triton_planes.py`;
`plane_choose.py` says how many tokens go which way). `reference.py` is the oracle of both.
Must never know: files, models. A new format: `quant/block_weight.py` and `quant/block_planes.py`, `fields.py`, and
KINDS of cpu_blocks.c.
"""

from stoker_kernels.block_gemm.op import block_linear, block_rows
from stoker_kernels.block_gemm.planes import store_planes
from stoker_kernels.block_gemm.reference import decode_blocks, decode_piece

__all__ = ["block_linear", "block_rows", "decode_blocks", "decode_piece", "store_planes"]
