"""What `stoker info` says of a mixture of experts.

Invariants: the arithmetic is the engine's own. Knows nothing of how experts are chosen and multiplied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_runtime.terminal.words import Line, gib

if TYPE_CHECKING:
    from stoker_runtime.config import EngineConfig
    from stoker_runtime.models.spec import ModelSpec


def mixture_lines(spec: ModelSpec, config: EngineConfig) -> list[Line]:
    """How many experts there are, what of the weights a token reads, and which rest in host memory."""
    from stoker_runtime.models.hosted_experts import hosted_bytes, staged_bytes

    moe = spec.moe
    if moe is None:
        return []
    shared = ", and a shared one" if moe.shared_ffn else ""
    read = spec.active_bytes(config.dtype, config.quantization)
    total, active = spec.parameter_bytes("bfloat16") / 2e9, spec.active_bytes("bfloat16") / 2e9
    here = "" if moe.held is None else f"; {len(moe.held)} of them on this rank"
    where = "" if len(moe.layers) == spec.num_layers else f" in {len(moe.layers)} of {spec.num_layers} layers"
    hosted = [gib(count(spec, config.dtype, config.quantization)) for count in (hosted_bytes, staged_bytes)]
    place = f"{hosted[0]} of {len(moe.hosted)} layers; {hosted[1]} of the weights is where a layer of them is copied to"
    return [
        ("experts", f"{moe.top_k} of {moe.experts} for each token{shared}{where}{here}"),
        ("parameters", f"{total:.1f} billion, of which a token reads {active:.1f} billion ({gib(read)})"),
        *([("experts on host", place)] if moe.hosted else []),
    ]
