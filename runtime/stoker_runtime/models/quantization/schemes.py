"""The schemes of weights that lie in several tensors, and the names of their kinds.

Invariants: torch-free.
Knows nothing of files.
"""

from __future__ import annotations

from stoker_runtime.models.quantization.fp4_scheme import Fp4Scheme
from stoker_runtime.models.quantization.integer_scheme import IntegerScheme

Scheme = IntegerScheme | Fp4Scheme
PACKED_KINDS = ("int4", "int8", "nvfp4", "mxfp4")


def is_packed(kind: str) -> bool:
    """Whether a weight of this kind lies in several tensors, as its scheme says."""
    return kind in PACKED_KINDS
