"""Which tokens a head that drafts has rows for: `d2t` of its checkpoint, what to add to a row's number.

Invariants: every id is of the model's vocabulary, and no token has two rows; else a ModelError names the tensor.
Knows nothing of logits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stoker_runtime.checkpoint.safetensors_index import read_checkpoint_index
from stoker_runtime.errors import ModelError

NAME = "d2t"
_INTEGERS = {"I64": "<i8", "I32": "<i4"}


def read_head_ids(folder: Path, drafted: int, vocab: int) -> Tensor | None:
    """`[drafted]` int64, the token of each row of the head; None where its rows are the model's `vocab` tokens."""
    entry = read_checkpoint_index(folder).get(NAME)
    if entry is None and drafted == vocab:
        return None
    if entry is None:
        raise ModelError(
            f"{folder}: the head drafts {drafted} of the model's {vocab} tokens, and tensor {NAME} is missing, which "
            "says which ones.",
            param=NAME,
        )
    if entry.shape != (drafted,) or entry.encoding not in _INTEGERS:
        raise ModelError(
            f"{entry.file}: tensor {NAME} is {entry.encoding} {list(entry.shape)}; it must be I64 or I32 [{drafted}], "
            "as many as draft_vocab_size says.",
            param=NAME,
        )
    offsets = np.fromfile(entry.file, dtype=_INTEGERS[entry.encoding], count=drafted, offset=entry.offset)
    ids = np.arange(drafted) + offsets.astype(np.int64)
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != drafted:
        raise ModelError(
            f"{entry.file}: tensor {NAME} leads to tokens {ids.min()} to {ids.max()}, some of them twice or beyond the "
            f"model's {vocab}.",
            param=NAME,
        )
    return torch.from_numpy(ids)
