"""Locally typical sampling as a token mask (Meister et al. 2023): keep the tokens whose surprise is nearest the mean.

A token's surprise is -log2 p, the mean is the entropy; tokens are kept from the nearest on until their probabilities
add up to `typical_p`. Both are taken from integers (weights as in reference.py, surprise in 4096ths of a bit), so that
the set does not depend on the order of sums, on the batch, or on the device.

Invariants: only bits of rows whose slot asks for it change, and only from allowed to forbidden; tokens that tie with
the last one kept are kept too.
Knows nothing of how a token is chosen among those that are left.
"""

from __future__ import annotations

from torch import Tensor

from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports
from stoker_kernels.sampling.op import LOGITS_DTYPES
from stoker_kernels.sampling.state import SamplingState

register(
    "typical_mask",
    "triton",
    "stoker_kernels.sampling.triton_typical:typical_mask",
    triton_supports(*LOGITS_DTYPES),
    invariant=True,
)
register(
    "typical_mask",
    "reference",
    "stoker_kernels.sampling.reference_typical:typical_mask",
    reference_supports,
    invariant=True,
)


def typical_mask(logits: Tensor, state: SamplingState, row_slots: Tensor, positions: Tensor, bitmask: Tensor) -> None:
    """Forbid in `bitmask [R, ceil(V/32)]` what is not typical of the rows' distributions, in place.

    Arguments as `sampling.sample` takes them; logits count after bitmask, bias, penalties and temperature. Rows that
    are greedy, padding, or of slots with `typical_p` 1 stay as they are.
    """
    select("typical_mask", logits.device, logits.dtype)(logits, state, row_slots, positions, bitmask)
