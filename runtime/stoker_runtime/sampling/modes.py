"""The five ways of a step through the sampler, from the least work to the most."""

from __future__ import annotations

GREEDY = "greedy"
SAMPLE = "sample"
ADJUST = "adjust"
TYPICAL = "typical"
MASKED = "masked"
MODES = (GREEDY, SAMPLE, ADJUST, TYPICAL, MASKED)
