"""The rotary embedding of a GGUF file, as the `rope_scaling` of a config.json.

Invariants: what a file says by numbers in tensors, the divisors of frequencies, is read here and nowhere else. The part
of a head that rotates is always given, so that no architecture's own default takes its place.
Knows nothing of tables and of what architectures do with the numbers.
"""

from __future__ import annotations

import struct
from typing import Any

from stoker_runtime.checkpoint.gguf_header import GGUFHeader
from stoker_runtime.errors import ModelError

FACTORS = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
KEYS = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def read_rope_scaling(header: GGUFHeader, architecture: str, head_dim: int) -> dict[str, Any]:
    """What the file says of rotation beside its base. Raises ModelError for factors that are no F32."""
    metadata, prefix = header.metadata, f"{architecture}.rope.scaling"
    partial = {"partial_rotary_factor": metadata.get(f"{architecture}.rope.dimension_count", head_dim) / head_dim}
    if FACTORS in header.tensors:
        return {"rope_type": "factors", "factors": _read_factors(header, FACTORS)} | partial
    known = {key: metadata[f"{prefix}.{name}"] for name, key in KEYS.items() if f"{prefix}.{name}" in metadata}
    if LONG in header.tensors:
        factors = {"short_factor": _read_factors(header, SHORT), "long_factor": _read_factors(header, LONG)}
        if f"{prefix}.attn_factor" in metadata:
            factors["attention_factor"] = metadata[f"{prefix}.attn_factor"]
        return {"rope_type": "longrope", **factors, **known} | partial
    kind = metadata.get(f"{prefix}.type", "none")
    if kind in ("none", "longrope"):
        # Phi-3's short models say how long they were trained, and have no factors.
        return partial
    return {"rope_type": kind, "factor": metadata.get(f"{prefix}.factor"), **known} | partial


def _read_factors(header: GGUFHeader, name: str) -> list[float]:
    entry = header.tensors.get(name)
    if entry is None:
        raise ModelError(f"{header.path}: tensor {name} is missing beside {LONG}.")
    if entry.encoding != "F32":
        raise ModelError(f"{entry.file}: tensor {entry.name} is {entry.encoding}; it must be F32.")
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        return list(struct.unpack(f"<{entry.num_bytes // 4}f", file.read(entry.num_bytes)))
