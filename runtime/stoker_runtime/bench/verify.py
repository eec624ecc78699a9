"""Is what the engine generated what the model says? Teacher-forced, against the plain reference.

The reference runs once over prompt and output; at every position its best token must be the engine's. A mismatch
passes only where the engine's token lies within a tolerance of the reference's best, in logits: there rounding decides.
From there the comparison goes on with the engine's token, so one near-tie hides nothing after it. What all tokens lost
on average has a bound of its own: it is a fifth of one token's or less, and no rare pair of roundings moves it. Where
tokens are so few that one may move it, all together may lose what one may.
Invariants: pure check, changes nothing. Knows nothing of timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stoker_runtime.bench.reference.model import reference_logits
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding may cost, in logits: `one` token that the engine chose, and the `mean` of all."""

    one: float
    mean: float


# Where weights are random, logits spread by 1.2, and 28 layers amplify the difference between two right computations
# tenfold, of bf16 (0.4%) to a few percent, of W8A8 (two independent roundings to 3 bits, 4%) to a third: 0.8 logits
# between two tokens, so that one in some thousands loses three times as much. A wrong kernel loses all of the best
# token's lead, five logits and more, at every position. Keys and values alone in 8 bits lie between: 1.2 at worst, 0.15
# on average.
TOLERANCE_BF16 = Tolerance(0.4, 0.05)
TOLERANCE_FP8_HEAD = Tolerance(1.0, 0.125)
TOLERANCE_FP8_KV = Tolerance(2.0, 0.25)
TOLERANCE_FP8 = Tolerance(3.5, 0.7)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How `sequences` compared: `wrong` mismatches beyond the tolerance, `ties` within it.

    `worst` and `mean` are by how much the engine's token lost to the reference's best, in logits; `most_mean` bounds
    the latter.
    """

    sequences: int
    positions: int
    ties: int
    wrong: int
    worst: float
    mean: float
    most_mean: float

    @property
    def passed(self) -> bool:
        """No token nor their mean is beyond the tolerance, and something was compared."""
        return self.wrong == 0 and self.positions > 0 and self.mean <= self.most_mean


def verify_greedy(
    spec: ModelSpec,
    weights: DecoderWeights,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    tolerance: Tolerance,
    longest: int = 0,
) -> Verdict:
    """Compare greedy outputs: `sequences` are (prompt ids, generated ids). `longest` as in `reference_logits`."""
    positions = ties = wrong = 0
    worst = total = 0.0
    for prompt, output in sequences:
        logits = reference_logits(spec, weights, [*prompt, *output[:-1]], len(prompt) - 1, longest=longest)
        chosen = torch.tensor(list(output), device=logits.device)
        best = logits.max(dim=1)
        lost = best.values - logits.gather(1, chosen[:, None])[:, 0]
        differs = best.indices != chosen
        positions += len(output)
        ties += int((differs & (lost <= tolerance.one)).sum())
        wrong += int((differs & ~(lost <= tolerance.one)).sum())
        worst = max(worst, float(lost.max()))
        total += float(lost.sum())
    compared = max(positions, 1)
    bound = max(tolerance.mean, tolerance.one / compared)
    return Verdict(len(sequences), positions, ties, wrong, worst, total / compared, bound)
