"""Is what the engine generated what the model says? Teacher-forced, against the plain reference.

The reference runs once over prompt and output; at every position its best token must be the engine's. A mismatch
passes only where the reference's own top two logits lie closer than `epsilon`: there rounding decides. From there the
comparison goes on with the engine's token, so one near-tie hides nothing after it.
Invariants: pure check, changes nothing. Knows nothing of timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stoker_runtime.bench.reference_model import reference_logits
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.layout import DecoderWeights

# What rounding may cost, in logits, where weights are random: logits then spread by 1.2, and 28 layers amplify the
# difference between two right computations tenfold, of bf16 (0.4%) to a few percent, of W8A8 (two independent roundings
# to 3 bits, 4%) to a third. A wrong kernel loses all of the best token's lead, five logits and more.
EPSILON_BF16 = 0.4
EPSILON_FP8 = 2.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a set of sequences compared: `wrong` mismatches beyond epsilon, `ties` within it.

    `worst` and `mean` are by how much the engine's token lost to the reference's best, in logits.
    """

    positions: int
    ties: int
    wrong: int
    worst: float
    mean: float

    @property
    def passed(self) -> bool:
        """No mismatch beyond epsilon, and something was compared."""
        return self.wrong == 0 and self.positions > 0


def verify_greedy(
    spec: ModelSpec,
    weights: DecoderWeights,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    epsilon: float,
) -> Verdict:
    """Compare greedy outputs: `sequences` are (prompt ids, generated ids), `epsilon` is in logits."""
    positions = ties = wrong = 0
    worst = total = 0.0
    for prompt, output in sequences:
        logits = reference_logits(spec, weights, [*prompt, *output[:-1]], len(prompt) - 1)
        chosen = torch.tensor(list(output), device=logits.device)
        best = logits.max(dim=1)
        lost = best.values - logits.gather(1, chosen[:, None])[:, 0]
        differs = best.indices != chosen
        positions += len(output)
        ties += int((differs & (lost <= epsilon)).sum())
        wrong += int((differs & ~(lost <= epsilon)).sum())
        worst = max(worst, float(lost.max()))
        total += float(lost.sum())
    return Verdict(positions, ties, wrong, worst, total / max(positions, 1))
