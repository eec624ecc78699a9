"""Products with a linear layer's weight, BF16 and FP8: `linear`, `linear_silu_mul` for the gated half of an MLP, and
both with what adapters add (`adapted.py`).

`choose.py` runs cuBLAS or the tile that `table.py` names, which knows what was measured on this machine (`tuned.py`):
`small.py` (few tokens), `spread.py` (up to 256), `wide.py`, `gated.py`; csrc/ has their CUDA. On CPUs `cpu/onednn.py`
runs, over weights that `pack` has put in its order. Where a row's bits may not depend on the batch: `fixed.py`, which
`shape_refusal` speaks for, and `cpu/dot.py`.
Must never know: what the weight belongs to. A new tile family: its host side and csrc here, its rows in `table.py`.
"""

from stoker_kernels.gemm.adapted import adapted_linear, adapted_silu_mul
from stoker_kernels.gemm.cpu.onednn import pack
from stoker_kernels.gemm.fixed import shape_refusal
from stoker_kernels.gemm.gated import linear_silu_mul
from stoker_kernels.gemm.op import linear
from stoker_kernels.gemm.tuned import GemmWeight, use_tuned

__all__ = [
    "GemmWeight",
    "adapted_linear",
    "adapted_silu_mul",
    "linear",
    "linear_silu_mul",
    "pack",
    "shape_refusal",
    "use_tuned",
]
