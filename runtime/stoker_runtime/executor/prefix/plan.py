"""Whether steps of a model may attend a shared prefix, and the memory that those take.

Invariants: pure; follows from the resolved settings and the model. Knows nothing of GPUs.
"""

from __future__ import annotations

from stoker_kernels.attention import PrefixSizes
from stoker_runtime.config import EngineConfig
from stoker_runtime.models.parameter import ITEM_BYTES
from stoker_runtime.models.spec import ModelSpec

PINNED = ("attention", "paged_attention")  # the names of the op of plain attention


def model_refusal(config: EngineConfig, spec: ModelSpec) -> str | None:
    """Why no step of this model attends a shared prefix, on any GPU; None where some may. `config` is resolved."""
    if config.disable_cascade_attn:
        return "--disable-cascade-attn was given"
    if config.batch_invariant:
        return "--batch-invariant was given, and the bits of a row would depend on its neighbours"
    if any(op in PINNED for op, _ in config.kernels):
        return "--kernel pins what attends each row"
    if spec.latent is not None:
        return "latents are attended by kernels of their own"
    plain = not any(spec.windows) and spec.attention_softcap == 0.0 and not spec.sinks
    if not plain or spec.slopes or spec.sparse is not None:
        return "layers have a window, a soft-cap, sinks, slopes or a pattern of blocks"
    return None


def prefix_sizes(config: EngineConfig, spec: ModelSpec) -> PrefixSizes:
    """Of the steps of a resolved `config`."""
    pages = -(-config.max_model_len // config.page_size)
    heads = (spec.heads, spec.kv_heads, spec.head_dim)
    return PrefixSizes(config.max_num_seqs, pages, config.page_size, *heads, ITEM_BYTES[config.kv_cache_dtype])


def prefix_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes on a GPU of what such steps keep; 0 where there are none."""
    if config.device == "cpu" or model_refusal(config, spec) is not None:
        return 0
    return prefix_sizes(config, spec).nbytes
