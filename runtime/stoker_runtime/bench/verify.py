"""Is what the engine generated what the model says? Teacher-forced, against the plain reference.

The reference runs once over prompt and output; at every position its best token must be the engine's. A mismatch
passes only where the engine's token lies within a tolerance of the reference's best, in logits: there rounding decides.
From there the comparison goes on with the engine's token, so one near-tie hides nothing after it. What all tokens lost
on average has a bound of its own: it is a fifth of one token's or less, and no rare pair of roundings moves it. Where
tokens are so few that one may move it, all together may lose what one may.
A router chooses by rounding, too, where two experts weigh alike, and another expert is another result, and deep models
in 8 bits differ the more the deeper they are: of both the reference is run a second time, with its own stream rounded
and what its routers read and say, and what that loses widens the bounds. A mixture's token beyond them passes where
the reference says it, too, once its routers' logits are moved by as little as roundings do; some such runs are tried.
Invariants: pure check, changes nothing. Knows nothing of timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stoker_runtime.bench.reference.adapter import adapted
from stoker_runtime.bench.reference.model import reference_logits
from stoker_runtime.bench.reference.rounding import ROUTER_NOISE, Rounding
from stoker_runtime.bench.reference.weights import rows_of
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding may cost, in logits: `one` token that the engine chose, and the `mean` of all.

    `layers`: it is so for a model of so many, and grows with the root of more, and with the width; 0: it is the same
    for every model. `rounding`: so many times what the reference loses on average by rounding its stream may be lost,
    too, and `one` grows alike, at most twofold; 0: that is not asked.
    """

    one: float
    mean: float
    layers: int = 0
    rounding: float = 0.0

    def of(self, layers: int, hidden: int) -> Tolerance:
        """For a model of `layers` that are `hidden` wide: what each layer rounds is added to the stream, and goes as
        often up as down; logits spread as the root of the width, and what is lost as the width itself, as was seen.
        """
        if not self.layers:
            return self
        growth = max(layers / self.layers, 1.0) ** 0.5 * max(hidden / HIDDEN, 1.0)
        return Tolerance(self.one * growth, self.mean * growth)

    def mean_of(self, count: int) -> float:
        """What `count` tokens may lose in the mean: so few that one may move it, all together what one may."""
        return max(self.mean, self.one / count)


# Where weights are random, logits spread by 1.2, and 28 layers amplify the difference between two right computations
# tenfold, of bf16 (0.4%) to a few percent, of W8A8 (two independent roundings to 3 bits, 4%) to a third: 0.8 logits
# between two tokens, so that one in some thousands loses three times as much. A wrong kernel loses all of the best
# token's lead, five logits and more, at every position. Keys and values alone in 8 bits lie between: 1.2 at worst, 0.15
# on average. A head alone in 8 bits rounds states that differ as those of bf16 do once more, which at most doubles what
# they lose: 0.04 at worst of 1,024 tokens of 0.6B on an H200. An adapter adds a rounding to every linear: of
# 7B on an H200 that lost 0.45 at worst of 1,792 tokens, where 0.23 was lost without; on average 0.012 after 0.007.
# Of more layers more is lost: 0.40 to 0.51 at worst by right outputs of 40 and 48. Of fewer no less is allowed, for the
# ends of a model round as well. Wide models lose more: with 40 layers of 8,192 one GPU lost 0.78 at worst and 0.060 on
# average, two GPUs 0.74 and 0.073; with 80 layers two lost 1.41 and 0.159.
LAYERS, HIDDEN = 28, 3584
TOLERANCE_BF16 = Tolerance(0.4, 0.05, LAYERS)
TOLERANCE_FP8_HEAD = Tolerance(0.8, 0.1, LAYERS)
TOLERANCE_ADAPTERS = Tolerance(0.8, 0.05, LAYERS)
TOLERANCE_FP8_KV = Tolerance(2.0, 0.25, LAYERS)
# Two right W8A8 computations differ by as much as rounding can: a third of the spread of 28 layers. 14B's 40 lost 0.55
# to 0.65 on average, the 48 of Yi-1.5-9B, which do not norm their heads, 0.79 to 0.95, where the reference with its
# stream rounded lost 0.22 and 0.29: 2.8 and 3.2 times less, as an engine rounds in ten times as many places.
TOLERANCE_FP8 = Tolerance(3.5, 0.7, rounding=5.0)
# An engine rounds in some ten places of a layer, the reference that shows what rounding costs in one; what is lost
# grows with the variance, for a loss is as rare as it is small.
ROUNDINGS = 10.0
OTHER_CHOICES = 24
"""Runs of the reference that may show that a router's rounding chose a token."""


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


UNCHECKED = Verdict(0, 0, 0, 0, 0.0, 0.0, 0.0)
"""Of a row whose output nobody has looked at yet."""


def verify_greedy(
    spec: ModelSpec,
    base: DecoderWeights,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    tolerance: Tolerance,
    longest: int = 0,
    adapters: Sequence[Path | None] = (),
) -> Verdict:
    """Compare greedy outputs: `sequences` are (prompt ids, generated ids). `longest` as in `reference_logits`.

    `adapters` are the folders of the adapters that the sequences had, where they had any.
    """
    tolerance = tolerance.of(spec.num_layers, spec.hidden)
    losses, misses, bounds = [], [], [tolerance]
    for (prompt, output), adapter in zip(sequences, adapters or [None] * len(sequences), strict=True):
        weights = base if adapter is None else adapted(base, adapter)
        ids, first = [*prompt, *output[:-1]], len(prompt) - 1
        logits = reference_logits(spec, weights, ids, first, longest=longest)
        chosen = torch.tensor(list(output), device=logits.device)
        losses.append(_lost(logits, chosen))
        misses.append(logits.argmax(dim=1) != chosen)
        if spec.moe is not None or tolerance.rounding:
            dtype = rows_of(weights.embed, torch.tensor(ids[:1], device=logits.device)).dtype
            rounded = reference_logits(spec, weights, ids, first, longest=longest, rounding=Rounding(dtype))
            lost = _lost(logits, rounded.argmax(dim=1))
            bounds.append(_grown(tolerance, lost) if tolerance.rounding else _widened(tolerance, lost))
            if spec.moe is not None:
                losses[-1] = _by_other_choices(spec, weights, ids, chosen, losses[-1], bounds[-1], longest)
    bound = Tolerance(max(each.one for each in bounds), max(each.mean for each in bounds))
    if not losses:
        return UNCHECKED
    lost, differs = torch.cat(losses), torch.cat(misses)
    return Verdict(
        sequences=len(sequences),
        positions=len(lost),
        ties=int((differs & (lost <= bound.one)).sum()),
        wrong=int((differs & ~(lost <= bound.one)).sum()),
        worst=float(lost.max()),
        mean=float(lost.mean()),
        most_mean=bound.mean_of(len(lost)),
    )


def _lost(logits: Tensor, chosen: Tensor) -> Tensor:
    """By how much each chosen token [T] is below the best of logits [T, V]."""
    return logits.max(dim=1).values - logits.gather(1, chosen[:, None])[:, 0]


def _by_other_choices(
    spec: ModelSpec,
    weights: DecoderWeights,
    ids: list[int],
    chosen: Tensor,
    lost: Tensor,
    most: Tolerance,
    longest: int,
) -> Tensor:
    """What each chosen token `lost` [T], or the least of what it loses where routers choose otherwise; asked only while
    a token or their mean loses more than `most`.
    """
    for seed in range(OTHER_CHOICES):
        if bool((lost <= most.one).all()) and float(lost.mean()) <= most.mean_of(len(lost)):
            break
        moved = Rounding(noise=ROUTER_NOISE, seed=seed)
        logits = reference_logits(spec, weights, ids, len(ids) - len(chosen), longest=longest, rounding=moved)
        lost = torch.minimum(lost, _lost(logits, chosen))
    return lost


def _grown(tolerance: Tolerance, lost: Tensor) -> Tolerance:
    """`tolerance` for a model that amplifies rounding as what was `lost` tells; at most twice as wide."""
    growth = min(max(tolerance.rounding * float(lost.mean()) / tolerance.mean, 1.0), 2.0)
    return Tolerance(tolerance.one * growth, tolerance.mean * growth)


def _widened(tolerance: Tolerance, lost: Tensor) -> Tolerance:
    """`tolerance`, or what follows from what rounding alone has lost; never more than of 8-bit weights."""
    one, mean = ROUNDINGS * float(lost.max()), ROUNDINGS * float(lost.mean())
    return Tolerance(
        max(tolerance.one, min(one, TOLERANCE_FP8.one)), max(tolerance.mean, min(mean, TOLERANCE_FP8.mean))
    )
