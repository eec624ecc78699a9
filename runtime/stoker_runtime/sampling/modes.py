"""The five ways of a step through the sampler, from the least work to the most."""

from __future__ import annotations

GREEDY = "greedy"
SAMPLE = "sample"
ADJUST = "adjust"
TYPICAL = "typical"
MASKED = "masked"
MODES = (GREEDY, SAMPLE, ADJUST, TYPICAL, MASKED)
BY_ALL = (GREEDY, SAMPLE)
"""Those that need nothing but what each of several ranks has: no count of what was sampled, and no mask."""
