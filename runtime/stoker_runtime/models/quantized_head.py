"""The output head in fewer bits than the checkpoint has, by a setting of its own (`--quantize-head`).

A tied head then stands apart from the embedding, which keeps its numbers for lookups.
Invariants: torch-free; "none" changes nothing.
Knows nothing of products and of devices.
"""

from __future__ import annotations

from dataclasses import replace

from stoker_runtime.models.parameter import Role, stored_bytes
from stoker_runtime.models.spec import ModelSpec

HEAD_KINDS = {"fp8": "fp8_channel"}
"""What each value of the setting makes of the head."""


def with_head(spec: ModelSpec, asked: str) -> ModelSpec:
    """The spec whose head becomes what `asked` says."""
    return spec if asked == "none" else replace(spec, head_kind=HEAD_KINDS[asked])


def head_and_table(spec: ModelSpec, dtype: str, quantization: str) -> tuple[int, int]:
    """Device bytes of a head that stands apart, and of the embedding that a tied one could have shared, else 0."""
    sizes = {each.name: stored_bytes(each, dtype, quantization) for each in spec.parameters() if each.role in ENDS}
    return sizes.get("head", 0), sizes.get("embed", 0) if spec.tie_embeddings else 0


ENDS = (Role.HEAD, Role.EMBEDDING)
