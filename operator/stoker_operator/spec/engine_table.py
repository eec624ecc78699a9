"""The names of the engine's settings, made from its own table by tests/operator/spec/test_engine_arguments.py.

Invariants: equal to what the engine knows, or that test fails.
Knows nothing of what they mean; engine_arguments.py reads with it.
"""

from __future__ import annotations

SETTINGS: frozenset[str] = frozenset({
    "access-log",
    "allow-credentials",
    "allowed-headers",
    "allowed-methods",
    "allowed-origins",
    "api-key",
    "api-key-file",
    "api-server-count",
    "batch-concurrency",
    "batch-dir",
    "block-size",
    "chat-template",
    "config",
    "cpu-kv-gb",
    "cpu-threads",
    "device",
    "drain-seconds",
    "dtype",
    "enable-auto-tool-choice",
    "enable-log-requests",
    "enable-prefix-caching",
    "enforce-eager",
    "generation-config",
    "gpu-memory-reserve-gb",
    "gpu-memory-utilization",
    "host",
    "kernel",
    "kv-cache-dtype",
    "log-json",
    "log-level",
    "max-body-bytes",
    "max-file-bytes",
    "max-model-len",
    "max-num-batched-tokens",
    "max-num-seqs",
    "max-queued",
    "model",
    "num-cpu-blocks",
    "num-gpu-blocks",
    "pipeline-parallel-size",
    "pooler-config",
    "port",
    "quantization",
    "reasoning-parser",
    "request-timeout",
    "response-store-bytes",
    "revision",
    "runner",
    "scheduling-policy",
    "seed",
    "served-model-name",
    "ssl-ca-certs",
    "ssl-cert-reqs",
    "ssl-certfile",
    "ssl-ciphers",
    "ssl-keyfile",
    "swap-space",
    "tensor-parallel-size",
    "tokenizer",
    "tool-call-parser",
    "trust-request-chat-template",
})

SWITCHES: frozenset[str] = frozenset({
    "access-log",
    "allow-credentials",
    "enable-auto-tool-choice",
    "enable-log-requests",
    "enable-prefix-caching",
    "enforce-eager",
    "log-json",
    "trust-request-chat-template",
})

WORDS: frozenset[str] = frozenset({
    "allowed-headers",
    "allowed-methods",
    "allowed-origins",
    "served-model-name",
})

ALIASES: dict[str, str] = {
    "asc": "api-server-count",
    "kv-offloading-size": "swap-space",
    "num-gpu-blocks-override": "num-gpu-blocks",
    "override-pooler-config": "pooler-config",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "task": "runner",
    "tp": "tensor-parallel-size",
}

OPPOSITES: dict[str, str] = {
    "disable-log-requests": "enable-log-requests",
    "disable-uvicorn-access-log": "access-log",
}

OTHER_VARIABLES: tuple[str, ...] = (
    "STOKER_AOT_DIR",
    "STOKER_E2E_",
    "STOKER_FETCH_",
    "STOKER_K8S_",
    "STOKER_KERNELS_",
    "STOKER_KERNEL_CACHE",
    "STOKER_OPERATOR_",
)

VLLM_UNSUPPORTED: frozenset[str] = frozenset({
    "code-revision",
    "download-dir",
    "enable-expert-parallel",
    "enable-force-include-usage",
    "enable-lora",
    "headless",
    "hf-overrides",
    "hf-token",
    "kv-transfer-config",
    "lora-modules",
    "max-log-len",
    "middleware",
    "num-speculative-tokens",
    "otlp-traces-endpoint",
    "override-generation-config",
    "return-tokens-as-token-ids",
    "rope-scaling",
    "speculative-config",
    "stream-interval",
    "tokenizer-revision",
    "tool-server",
    "uvicorn-log-level",
})

VLLM_SWITCHES: frozenset[str] = frozenset({
    "async-scheduling",
    "disable-custom-all-reduce",
    "disable-frontend-multiprocessing",
    "disable-log-stats",
    "enable-chunked-prefill",
    "enable-prompt-tokens-details",
    "enable-request-id-headers",
    "enable-server-load-tracking",
    "enable-ssl-refresh",
    "enable-tokenizer-info-endpoint",
    "trust-remote-code",
})

VLLM_ONE_WORD: frozenset[str] = frozenset({
    "chat-template-content-format",
    "config-format",
    "cpu-offload-gb",
    "data-parallel-size",
    "load-format",
    "max-logprobs",
    "response-role",
    "root-path",
    "tokenizer-mode",
})

VLLM_WORDS: frozenset[str] = frozenset({
    "attention-backend",
    "attention-config",
    "compilation-config",
    "cuda-graph-sizes",
    "cudagraph-capture-sizes",
    "distributed-executor-backend",
    "guided-decoding-backend",
    "limit-mm-per-prompt",
    "max-num-partial-prefills",
    "max-parallel-loading-workers",
    "max-seq-len-to-capture",
    "mm-processor-kwargs",
    "model-impl",
    "optimization-level",
    "structured-outputs-config",
})
