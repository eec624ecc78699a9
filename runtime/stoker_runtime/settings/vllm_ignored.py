"""Flags of vLLM that are read and ignored: what they may be given, and what the engine does instead.

Invariants: none of them would change what comes out; a value that vLLM would not take is an error; each that is given
makes one line of the log.
Knows nothing of the flags that act and of those that are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_runtime.settings.media import MODALITIES
from stoker_runtime.settings.vllm_values import (
    COUNT,
    FLAG,
    LIST,
    OBJECT,
    TEXT,
    Kind,
    Values,
    decimal,
    either,
    json_object,
    matching,
    one_of,
    or_null,
    whole,
    wholes,
    word,
)


@dataclass(frozen=True, slots=True)
class Ignored:
    """What a flag may be given (None: it is a switch), and what the engine does `instead`."""

    values: Values | None
    instead: str


_BACKENDS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")
_ATTENTION = (
    *("AUTO", "CPU_ATTN", "CUSTOM", "CUTLASS_MLA", "DUAL_CHUNK_FLASH_ATTN", "FLASHINFER", "FLASHINFER_MLA"),
    *("FLASHINFER_MLA_SPARSE", "FLASHMLA", "FLASHMLA_SPARSE", "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASH_ATTN_MLA"),
    *("FLEX_ATTENTION", "NO_ATTENTION", "PALLAS", "ROCM_AITER_FA", "ROCM_AITER_MLA", "ROCM_AITER_MLA_SPARSE"),
    *("ROCM_AITER_TRITON_MLA", "ROCM_AITER_UNIFIED_ATTN", "ROCM_ATTN", "TORCH_SDPA", "TREE_ATTN", "TRITON_ATTN"),
    *("TRITON_MLA", "TRITON_MLA_SPARSE", "TURBOQUANT", "XFORMERS"),
)
_CAPTURE = "CUDA graphs are captured for the batches that --max-num-seqs allows; --enforce-eager has none"
_COMPILED = "kernels are compiled ahead; --enforce-eager leaves CUDA graphs out, --kernel pins an implementation"
_KERNELS = "kernels of attention are chosen by the GPU and the shapes; --kernel paged_attention=NAME pins one"
_MEDIA = "images are read in the API process, one after the other; requests with audio or video are refused"
_SCHEDULER = "each step takes what --max-num-batched-tokens leaves, of as many prompts as fit"
_RANKS = "ranks are processes of this machine, and with --nnodes of others"

_ATTENTION_KEYS: dict[str, Kind] = {
    "backend": Kind(
        "a name that --attention-backend takes",
        lambda value: value is None or (isinstance(value, str) and value.upper() in _ATTENTION),
    ),
    "flash_attn_version": or_null(word(2, 3, 4)),
    "flash_attn_max_num_splits_for_cuda_graph": COUNT,
    "tq_max_kv_splits_for_cuda_graph": COUNT,
    "use_trtllm_attention": or_null(FLAG),
    **dict.fromkeys(
        (
            *("use_prefill_decode_attention", "use_cudnn_prefill", "use_trtllm_ragged_deepseek_prefill"),
            *("disable_flashinfer_prefill", "disable_flashinfer_q_quantization", "use_prefill_query_quantization"),
        ),
        FLAG,
    ),
}
_COMPILATION_KEYS: dict[str, Kind] = {
    "level": or_null(word(0, 1, 2, 3)),
    "mode": or_null(word(0, 1, 2, 3, "NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")),
    "cudagraph_mode": or_null(word(0, 1, 2, "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")),
    "compile_cache_save_format": word("binary", "unpacked"),
    "cudagraph_capture_sizes": or_null(
        Kind(
            "a list of whole numbers",
            lambda value: isinstance(value, list) and all(type(each) is int and each > 0 for each in value),
        )
    ),
    "max_cudagraph_capture_size": or_null(COUNT),
    "max_capture_size": or_null(COUNT),
    "cudagraph_num_of_warmups": COUNT,
    **dict.fromkeys(("debug_dump_path", "cache_dir", "local_cache_dir", "backend"), or_null(TEXT)),
    **dict.fromkeys(("custom_ops", "splitting_ops", "compile_sizes"), or_null(LIST)),
    **dict.fromkeys(("compile_ranges_split_points", "compile_ranges_endpoints"), or_null(LIST)),
    **dict.fromkeys(("inductor_compile_config", "inductor_passes", "pass_config", "dynamic_shapes_config"), OBJECT),
    **dict.fromkeys(
        (
            *("use_inductor", "use_cudagraph", "full_cuda_graph", "cudagraph_copy_inputs", "compile_mm_encoder"),
            *("use_inductor_graph_partition", "cudagraph_specialize_lora", "fast_moe_cold_start"),
        ),
        or_null(FLAG),
    ),
}
_STRUCTURED_KEYS: dict[str, Kind] = {
    "backend": Kind(f"one of {', '.join(_BACKENDS)}", lambda value: value in _BACKENDS),
    "reasoning_parser": TEXT,
    "reasoning_parser_plugin": TEXT,
    **dict.fromkeys(
        ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "enable_in_reasoning"), FLAG
    ),
}
_STRUCTURED_REFUSED = {
    "disable_any_whitespace": "requests ask for it by that field of their structured_outputs",
    "disable_additional_properties": "requests ask for it by that field of their structured_outputs",
    "enable_in_reasoning": "constraints begin where reasoning ends",
    "reasoning_parser": "use --reasoning-parser",
    "reasoning_parser_plugin": "no code is loaded into the server",
}
_CHUNKS = Ignored(whole(1), _SCHEDULER)

IGNORED: dict[str, Ignored] = {
    "allowed-local-media-path": Ignored(
        matching("(/.*)?", "an absolute path, or empty"), "images never come from files of the server"
    ),
    "attention-backend": Ignored(one_of(*_ATTENTION, any_case=True), _KERNELS),
    "attention-config": Ignored(json_object(_ATTENTION_KEYS), _KERNELS),
    "compilation-config": Ignored(either(whole(0, 3), json_object(_COMPILATION_KEYS)), _COMPILED),
    "cuda-graph-sizes": Ignored(wholes(1), _CAPTURE),
    "cudagraph-capture-sizes": Ignored(wholes(1), _CAPTURE),
    "data-parallel-backend": Ignored(one_of("mp", "ray"), _RANKS),
    "disable-async-output-proc": Ignored(None, "steps are always launched one ahead"),
    "disable-chunked-mm-input": Ignored(None, _MEDIA),
    "disable-frontend-multiprocessing": Ignored(None, "the engine has a process of its own, beside the server's"),
    "disable-log-stats": Ignored(None, "figures are at /metrics; the log has a line of them only for drafts"),
    "disable-mm-preprocessor-cache": Ignored(None, _MEDIA),
    "distributed-executor-backend": Ignored(one_of("ray", "mp", "uni", "external_launcher"), _RANKS),
    "enable-flashinfer-autotune": Ignored(None, "--tune measures products on this GPU"),
    "guided-decoding-backend": Ignored(one_of(*_BACKENDS), "one compiler of grammars serves all requests"),
    "interleave-mm-strings": Ignored(None, _MEDIA),
    "long-prefill-token-threshold": Ignored(whole(0), _SCHEDULER),
    "max-cudagraph-capture-size": Ignored(whole(0), _CAPTURE),
    "max-long-partial-prefills": _CHUNKS,
    "max-num-partial-prefills": _CHUNKS,
    "max-parallel-loading-workers": Ignored(whole(1), "each rank reads its own part of the files"),
    "max-seq-len-to-capture": Ignored(whole(1), "CUDA graphs serve sequences of every length"),
    "media-io-kwargs": Ignored(json_object(dict.fromkeys(MODALITIES, OBJECT)), _MEDIA),
    "mm-encoder-tp-mode": Ignored(one_of("weights", "data"), _MEDIA),
    "mm-processor-cache-gb": Ignored(decimal(0), _MEDIA),
    "mm-processor-cache-type": Ignored(one_of("lru", "shm"), _MEDIA),
    "mm-shm-cache-max-object-size-mb": Ignored(whole(0), _MEDIA),
    "model-impl": Ignored(one_of("auto", "vllm", "transformers", "terratorch"), "one decoder runs every model"),
    "num-scheduler-steps": Ignored(whole(1), "the scheduler looks at every step"),
    "optimization-level": Ignored(whole(0, 3), _COMPILED),
    "performance-mode": Ignored(one_of("balanced", "interactivity", "throughput"), _SCHEDULER),
    "preemption-mode": Ignored(one_of("recompute", "swap"), "preempted KV goes to --swap-space where it has room"),
    "prefix-caching-hash-algo": Ignored(
        one_of("builtin", "sha256", "sha256_cbor", "sha256_cbor_64bit", "xxhash", "xxhash_cbor"),
        "pages are told apart by BLAKE2 of all tokens up to them",
    ),
    "skip-mm-profiling": Ignored(None, _MEDIA),
    "structured-outputs-config": Ignored(
        json_object(_STRUCTURED_KEYS, _STRUCTURED_REFUSED), "one compiler of grammars serves all requests"
    ),
    "trust-remote-code": Ignored(None, "a model's own code is never run"),
    "use-tqdm-on-load": Ignored(None, "the log says how far loading is"),
    "use-v2-block-manager": Ignored(None, "there is one manager of KV pages"),
    "video-pruning-rate": Ignored(decimal(0), _MEDIA),
}
"""How vLLM is to do its work, or to read media: what comes out does not depend on it."""
