"""The argmax of rows whose vocabulary is cut into parts, of which several devices have one each.

A row's peak in a part is its highest logit with the lowest id that has it, and is told in PEAK_DIGITS numbers of 0 to
255, which bf16 holds exactly. They stand in columns of the part's own, and zeros in those of the others. So the sum
over the parts has all peaks beside each other, whoever adds, in whatever order; of them `best_peak` takes what `argmax`
of the whole row takes: the same value counts as highest, and of equals the lowest id.
Invariants: a row's result depends on that row alone.
Knows nothing of devices other than its own, nor of how parts are added up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports
from stoker_kernels.sampling.op import LOGITS_DTYPES

PEAK_DIGITS = 8
"""Of a peak: four of its logit, ordered as integers are, and four of its id, the lowest digits first."""
PEAKS_DTYPE = torch.bfloat16

# By the type of what is read, or of what comes out: bf16 is carried, not computed with, which older GPUs can, too.
for _op, _dtypes in (("part_peaks", LOGITS_DTYPES), ("best_peak", (torch.int32,))):
    register(_op, "triton", f"stoker_kernels.sampling.triton_parts:{_op}", triton_supports(*_dtypes), invariant=True)
    _path = f"stoker_kernels.sampling.reference_parts:{_op}"
    register(_op, "reference", _path, reference_supports, invariant=True)


def part_peaks(logits: Tensor, first: int, part: int, parts: int) -> Tensor:
    """`logits [R,W]`, the columns of the vocabulary from `first` on → `[R, parts · PEAK_DIGITS]` bf16.

    Their peaks, in the columns of part number `part` of `parts`.
    """
    peaks: Tensor = select("part_peaks", logits.device, logits.dtype)(logits, first, part, parts)
    return peaks


def best_peak(peaks: Tensor) -> Tensor:
    """What `part_peaks` gives of each part, added up, `[R, parts · PEAK_DIGITS]` → `[R]` int32, as of `argmax`."""
    tokens: Tensor = select("best_peak", peaks.device, torch.int32)(peaks)
    return tokens
