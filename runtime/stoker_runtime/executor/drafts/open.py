"""What drafts beside a model, made of its plan and its weights.

Knows nothing of steps.
"""

from __future__ import annotations

from stoker_runtime.executor.drafts.head import HeadDrafter, NextDrafter
from stoker_runtime.executor.drafts.model import Drafter
from stoker_runtime.executor.drafts.plan import DraftHead, DraftModel
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.draft_heads.spec import NextSpec


def open_drafter(draft: DraftModel, weights: DecoderWeights, target: Decoder, pages: int) -> Drafter:
    """`draft`, with `weights`, beside `target`, which has so many pages; on its device and in its type."""
    device, dtype = weights.final_norm.device, target.dtype
    if isinstance(draft, DraftHead):
        kind = NextDrafter if isinstance(draft.head, NextSpec) else HeadDrafter
        return kind(draft, weights, target, pages, device, dtype)
    decoder = Decoder(draft.spec, weights, device, dtype, max_model_len=draft.config.max_model_len)
    return Drafter(draft, decoder, pages, device, dtype)
