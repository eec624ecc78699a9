"""The residual stream of one rank: what its layers give is a part, and the sum over the ranks is what counts.

Invariants: every rank's stream has the same bits. The sum, the addition and the norm are one kernel where GPUs sum by
their own, and where no layer norms what it gives.
Knows nothing of how ranks exchange anything.
"""

from __future__ import annotations

from torch import Tensor

from stoker_kernels.quant import FP8, AnyWeight, Quantized, activation_type
from stoker_runtime.models.layers.stream import Stream
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.collectives import Collectives


def reads_fp8(consumer: AnyWeight | None) -> bool:
    """Whether what is normed is quantized at once: integers are by the product, in a launch of its own."""
    return consumer is not None and activation_type(consumer) == FP8


class RankStream(Stream):
    """For models whose attention and feed-forward follow each other."""

    def __init__(self, spec: ModelSpec, collectives: Collectives) -> None:
        super().__init__(spec)
        self._collectives = collectives
        self._adds_plainly = not self._is_layer_norm and self._multiplier == 1.0

    def _add(
        self,
        update: Tensor,
        stream: Tensor,
        post: Tensor | None,
        norm: Tensor | None,
        bias: Tensor | None,
        consumer: AnyWeight | None,
        also: Tensor | None = None,
    ) -> Tensor | Quantized:
        """As `Stream`, of the sum of all ranks' `update`."""
        peers = self._collectives.peers_for(update)
        if peers is None or norm is None or post is not None or not self._adds_plainly:
            return super()._add(self._collectives.sum(update), stream, post, norm, bias, consumer, also)
        if reads_fp8(consumer):
            return peers.sum_add_rms_norm_quant(update, stream, norm, self._eps)
        return peers.sum_add_rms_norm(update, stream, norm, self._eps)
