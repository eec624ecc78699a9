"""What the model gets for one step, and nothing else.

Invariants: every tensor lies on the model's device; rows are ordered as in `Batch` (decodes, then prefill chunks);
the shapes below hold for padded steps too, where a padded token has slot -1 and a padded row has KV length 0.
Knows nothing of requests, of sampling, or of how the tensors were made.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stoker_kernels.attention import AttentionMeta


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """`T` tokens of `S` rows, flattened row after row.

    `ids`, `positions`: `[T]` int32. `slot_mapping`: `[T]` int64, page · page_size + offset where the token's
    key and value go; -1 writes nothing. `logits_rows`: indices into the `T` tokens whose hidden state is wanted,
    int64; None wants all of them (a pure decode step, where T = S).
    """

    ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    attention: AttentionMeta
    logits_rows: Tensor | None = None
