"""Products with weights of few bits on a CPU, sixteen rows side by side: integers of 4 and 8 bits, floats of 4.

`order.py` is the order of codes, `product.py` the host side of csrc/, which multiplies them as they lie. The ops
`integer_gemm` and `fp4_gemm` say when it runs and what runs elsewhere.
Must never know: files and formats, models. A new form of numbers: a table in `launch/csrc/cpu_lanes.h`.
"""

from stoker_kernels.lane_gemm.order import from_lanes, to_lanes
from stoker_kernels.lane_gemm.product import lanes_refusal, multiply, pack_lanes, supports

__all__ = ["from_lanes", "lanes_refusal", "multiply", "pack_lanes", "supports", "to_lanes"]
