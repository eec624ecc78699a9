"""From logits to tokens and log-probabilities on the device, without a sort of the vocabulary.

`op.py` is the public side, `parts.py` that of a vocabulary in parts, `state.py` the parameters by slot, `triton_*` the
kernels, `reference.py` the oracle.
Must never know: requests, grammars (a bitmask arrives). A new parameter: a field in `state.py`, its rule in
`reference.py`, then in the kernels.
"""

from stoker_kernels.sampling.op import argmax, sample, token_logprobs
from stoker_kernels.sampling.parts import PEAK_DIGITS, PEAKS_DTYPE, best_peak, part_peaks
from stoker_kernels.sampling.state import (
    FOREVER,
    MAX_BIAS,
    SamplingState,
    SlotSampling,
    apply_slot_sampling,
    pack_slot_sampling,
)
from stoker_kernels.sampling.typical import typical_mask

__all__ = [
    "FOREVER",
    "MAX_BIAS",
    "PEAKS_DTYPE",
    "PEAK_DIGITS",
    "SamplingState",
    "SlotSampling",
    "apply_slot_sampling",
    "argmax",
    "best_peak",
    "pack_slot_sampling",
    "part_peaks",
    "sample",
    "token_logprobs",
    "typical_mask",
]
