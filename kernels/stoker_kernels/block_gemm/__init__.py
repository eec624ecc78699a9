"""Products with weights in the blocks of GGUF, and rows of such tables: `block_linear`, `block_rows`.

`csrc/cpu_blocks.c` unpacks and multiplies on a CPU (`cpu.py`, compiled by `launch/cc.py`); `reference.py` is the
oracle.
Must never know: files, models. A new format: `quant/block_weight.py`, `reference.py`, and KINDS of cpu_blocks.c.
"""

from stoker_kernels.block_gemm.op import block_linear, block_rows
from stoker_kernels.block_gemm.reference import decode_blocks

__all__ = ["block_linear", "block_rows", "decode_blocks"]
