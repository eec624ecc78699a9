"""May these tokens have been sampled? Teacher-forced, against the plain reference's logits.

At every position the reference's logits are penalized and biased as the request asks, in fp32 and by its own tokens so
far. The engine's token must then pass every filter, each by itself, within a tolerance in logits: rounding decides at
the edge. And tokens have to be drawn as often as they weigh: the sum of (log p + entropy) of what was drawn, which is 0
on average for tokens drawn from p, is compared with its standard deviation. Greedy choice, another temperature, or a
penalty left out move it by many of these.
Invariants: pure check; shares no code with the kernels that sample. Does not know typical-p, masks or grammars.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_runtime.bench.reference.model import reference_logits
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.request import SamplingParams

MOST_DEVIATIONS = 6.0
"""Standard deviations that the sum may be off: by chance once in 500 million rows."""
ROUNDED = 0.05
"""What rounding may move (log p + entropy) of a token by on average; an engine in bf16 moves it by a tenth of that."""
POSITIONS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Drawn:
    """`positions` compared: tokens that no filter should have passed, and how far the draws are from their weights.

    `drift` is the mean of (log p + entropy), `deviation` the standard deviation of that mean.
    """

    positions: int
    outside: int
    drift: float
    deviation: float

    @property
    def passed(self) -> bool:
        """Something was compared, all of it could be drawn, and was drawn as often as it weighs."""
        near = abs(self.drift) <= ROUNDED + MOST_DEVIATIONS * self.deviation
        return self.positions > 0 and not self.outside and near


def verify_sampled(
    spec: ModelSpec,
    weights: DecoderWeights,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    params: SamplingParams,
    tolerance: float,
    longest: int = 0,
) -> Drawn:
    """Compare sampled outputs: `sequences` are (prompt ids, generated ids), all drawn by `params`.

    `tolerance` is by how many logits the engine's may differ; `longest` as in `reference_logits`.
    """
    positions = outside = 0
    total = variance = 0.0
    for prompt, output in sequences:
        ids, first = [*prompt, *output[:-1]], len(prompt) - 1
        logits = reference_logits(spec, weights, ids, first, longest=longest)
        chosen = torch.tensor(list(output), device=logits.device)
        changed = _penalized(logits, prompt, output, params)
        positions += len(output)
        for part, own in zip(changed.split(POSITIONS_AT_ONCE), chosen.split(POSITIONS_AT_ONCE), strict=True):
            outside += int((~may_be_drawn(part, own, params, tolerance)).sum())
            surprise, spread = surprises(part, own, params)
            total += float(surprise.sum())
            variance += float(spread.sum())
    count = max(positions, 1)
    return Drawn(positions, outside, total / count, math.sqrt(variance) / count)


def _penalized(logits: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Tensor:
    """Logits [T, V] in fp32 as the request changes them; position t has seen the prompt and `output[:t]`.

    The repetition penalty divides what is above zero and multiplies what is below, of prompt and output (CTRL, Keskar
    et al. 2019); frequency and presence are subtracted by the output's counts, as OpenAI's API defines them.
    """
    changed = logits.float().clone()
    for token, bias in params.logit_bias:
        changed[:, token] += bias
    if params.repetition_penalty == 1.0 and not params.frequency_penalty and not params.presence_penalty:
        return changed
    seen = torch.zeros(changed.shape[1], dtype=torch.bool, device=changed.device)
    seen[list(prompt)] = True
    counts = torch.zeros(changed.shape[1], device=changed.device)
    for row, token in zip(changed, output, strict=True):
        repeated = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
        row.copy_(torch.where(seen, repeated, row))
        row -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        seen[token] = True
        counts[token] += 1
    return changed


def may_be_drawn(logits: Tensor, chosen: Tensor, params: SamplingParams, tolerance: float) -> Tensor:
    """Whether each token of `chosen` [T] passes every filter over logits [T, V], of which each may be off by
    `tolerance`: as good as the k-th best, with less than top-p's weight better than it, and not below min-p's share.
    """
    own = logits.gather(1, chosen[:, None])
    fine = torch.ones_like(chosen, dtype=torch.bool)
    if params.top_k:
        worst = logits.topk(params.top_k, dim=1).values[:, -1:]
        fine &= (own >= worst - tolerance)[:, 0]
    if params.min_p:
        least = logits.max(dim=1, keepdim=True).values + math.log(params.min_p) * params.temperature
        fine &= (own >= least - tolerance)[:, 0]
    if params.top_p < 1.0:
        weights = (logits / params.temperature).softmax(dim=1)
        better = torch.where(logits > own + tolerance, weights, 0.0).sum(dim=1)
        # Logits that are off by as much make the better ones that much lighter, too.
        fine &= better * math.exp(-2 * tolerance / params.temperature) < params.top_p
    return fine


def surprises(logits: Tensor, chosen: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """log p + entropy of each token of `chosen` [T], and the variance of log p, over what the filters leave of logits
    [T, V]. A token that they do not leave counts as the least of those that they do.
    """
    scaled = logits.double() / params.temperature
    ordered, order = scaled.sort(dim=1, descending=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if params.top_k:
        kept[:, params.top_k :] = False
    if params.min_p:
        kept &= ordered >= ordered[:, :1] + math.log(params.min_p)
    weights = torch.where(kept, ordered, -math.inf).softmax(dim=1)
    if params.top_p < 1.0:
        kept &= weights.cumsum(dim=1) - weights < params.top_p
    left = torch.where(kept, ordered, -math.inf).log_softmax(dim=1)
    weights = left.exp()
    finite = torch.where(kept, left, 0.0)
    entropy = -(weights * finite).sum(dim=1)
    variance = (weights * finite.square()).sum(dim=1) - entropy.square()
    place = (order == chosen[:, None]).int().argmax(dim=1)
    last = kept.sum(dim=1) - 1
    own = left.gather(1, torch.minimum(place, last)[:, None])[:, 0]
    return own + entropy, variance.clamp(min=0.0)
