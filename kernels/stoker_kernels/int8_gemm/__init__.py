"""Products of activations and weights in integers of eight bits (W8A8): `int8_linear`.

`triton_int8.py` multiplies on every GPU what `quant` has quantized, `reference.py` is the oracle and the CPU's. On
Hopper the tiles of `gemm` do it (`gemm/int8_tiles.py`).
Must never know: files and formats, models. The numbers themselves are in `quant/int8_weight.py`.
"""

from stoker_kernels.int8_gemm.op import checked_rows, int8_linear

__all__ = ["checked_rows", "int8_linear"]
