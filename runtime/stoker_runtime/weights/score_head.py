"""The row that makes a decoder's last state a score: a checkpoint's own head of one label, or the difference of the
output head's rows of two answers.

The softmax of two logits is the sigmoid of their difference, so "yes" against "no" takes one row.
Invariants: in fp32, on the host; the tensor that is missing or misshaped is named.
Knows nothing of how states are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from stoker_runtime.checkpoint.safetensors_index import read_checkpoint_index
from stoker_runtime.checkpoint.tensor_entry import TensorEntry, find_entry
from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import ROWS
from stoker_runtime.models.config_source import ModelSource, SourceKind
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.copy_lanes import PLAIN_DTYPES
from stoker_runtime.weights.load import renamed, with_base
from stoker_runtime.weights.packed.mxfp4 import read_bytes
from stoker_runtime.weights.routing import SCORE_HEAD, Vocabulary, tensor_names


def read_score_row(source: ModelSource, spec: ModelSpec, answers: tuple[int, int] | None) -> Tensor:
    """`[hidden]`, fp32: the head of one label; of the tokens `answers` = (no, yes) the row of yes less that of no.

    `spec` is the whole model's, with the head that it generates with. Raises ModelError.
    """
    if source.path is None or source.kind is not SourceKind.FOLDER:
        raise ModelError(f"{source.name}: scores are read from a folder of safetensors.", param="model")
    row = ROWS[spec.architecture]
    entries = with_base(renamed(read_checkpoint_index(source.path), row.renamed), row.base)
    if answers is None:
        return _row(entries, SCORE_HEAD, (1, spec.hidden), 0, spec)
    if spec.logit_scale != 1.0 or spec.logit_softcap or spec.head_bias:
        raise ModelError(f"{source.name}: logits of {spec.architecture} are changed after the head; it does not score.")
    (name,) = tensor_names(spec, "embed" if spec.tie_embeddings else "head", Vocabulary.HF)
    no, yes = (_row(entries, name, (spec.vocab, spec.hidden), at, spec) for at in answers)
    return yes - no


def _row(entries: Mapping[str, TensorEntry], name: str, shape: tuple[int, int], at: int, spec: ModelSpec) -> Tensor:
    entry = find_entry(entries, name, shape, spec.architecture)
    if entry.encoding not in PLAIN_DTYPES:
        raise ModelError(
            f"{entry.file}: tensor {name} is {entry.encoding}; for scores it must be {', '.join(PLAIN_DTYPES)}."
        )
    size = entry.num_bytes // shape[0]
    one = replace(entry, shape=shape[1:], offset=entry.offset + at * size, num_bytes=size)
    return read_bytes(one).view(PLAIN_DTYPES[entry.encoding]).to(torch.float32)
