"""Flags of vLLM that are refused by name, and what there is instead.

Invariants: every flag of vLLM's that is not here, is a setting, asks for what is so, or is ignored; see vllm_flags.py.
Knows nothing of values: what follows such a flag is not read.
"""

from __future__ import annotations

_CODE = "no code is loaded into the server"
_DRAFTS = "it is a key of --speculative-config"
_MEDIA = "images come as URLs in messages, and a model that sees reads them in one way"
_OFFLOAD = "weights stay on the device; --cpu-offload-experts moves a mixture's experts, --isq makes all smaller"
_ENGINES = "the engines of --data-parallel-size are one server's; start a server for each engine to have them apart"
_EXPERTS = "experts stay where they were loaded; --enable-expert-parallel shares them whole"
_STATES = "states have one type and size; --num-state-snapshots says of how many prefixes they are kept"
_METRICS = "/metrics has the figures that there are"
_LORA = "adapters are in the model's own type, and have the settings of --enable-lora"
_LOADER = "safetensors and GGUF are read one way"
_STRUCTURED = "requests ask for it by that field of their structured_outputs"
_LOGS = "texts are never logged; --enable-log-requests logs parameters and counts"
_PROMPT_ADAPTERS = "adapters are LoRA's: --enable-lora"
_KERNELS = "--kernel OP=NAME pins an implementation"
_STATIC = "the server's HTTP parser bounds headers itself; --max-body-bytes bounds bodies"

_BY_REASON = {
    _CODE: (
        "middleware", "worker-extension-cls", "scheduler-cls", "logits-processors", "logits-processor-pattern",
        "io-processor-plugin", "tool-parser-plugin", "reasoning-parser-plugin",
    ),
    _DRAFTS: (
        "num-speculative-tokens", "speculative-model", "speculative-model-quantization", "speculative-max-model-len",
        "speculative-draft-tensor-parallel-size", "speculative-disable-mqa-scorer", "ngram-prompt-lookup-max",
        "speculative-disable-by-batch-size", "ngram-prompt-lookup-min", "num-lookahead-slots",
    ),
    "drafts are verified against what the model would say, always": (
        "spec-decoding-acceptance-method", "typical-acceptance-sampler-posterior-threshold",
        "typical-acceptance-sampler-posterior-alpha", "disable-logprobs-during-spec-decoding",
    ),
    _MEDIA: (
        "enable-mm-embeds", "mm-encoder-only", "mm-encoder-attn-backend", "mm-encoder-attn-dtype", "mm-tensor-ipc",
        "mm-encoder-fp8-scale-path", "mm-encoder-fp8-scale-save-path", "mm-encoder-fp8-scale-save-margin",
        "enable-multimodal-encoder-data-parallel", "ec-transfer-config",
    ),
    "an image has the size that the model's preprocessor_config.json says; change it there": ("mm-processor-kwargs",),
    _OFFLOAD: (
        "offload-backend", "cpu-offload-params", "offload-group-size", "offload-num-in-group", "offload-params",
        "offload-prefetch-step",
    ),
    _ENGINES: (
        "data-parallel-rank", "data-parallel-start-rank", "data-parallel-size-local", "data-parallel-address",
        "data-parallel-rpc-port", "data-parallel-hybrid-lb", "data-parallel-external-lb",
        "data-parallel-supervisor-port", "dp-supervisor-probe-interval-s", "dp-supervisor-probe-timeout-s",
        "dp-supervisor-probe-failure-threshold", "disable-nccl-for-dp-synchronization",
    ),
    _EXPERTS: (
        "enable-eplb", "eplb-config", "num-redundant-experts", "eplb-window-size", "eplb-step-interval",
        "eplb-log-balancedness", "expert-placement-strategy", "enable-elastic-ep", "enable-ep-weight-filter",
        "all2all-backend", "enable-dbo", "dbo-decode-token-threshold", "dbo-prefill-token-threshold", "ubatch-size",
    ),
    _STATES: ("mamba-ssm-cache-dtype", "mamba-block-size", "mamba-cache-mode", "mamba-backend", "gdn-prefill-backend"),
    _METRICS: (
        "show-hidden-metrics-for-version", "kv-cache-metrics", "kv-cache-metrics-sample", "cudagraph-metrics",
        "enable-mfu-metrics", "enable-logging-iteration-details", "aggregate-engine-logging",
        "enable-per-request-metrics",
    ),
    "profile with `stoker bench`; --otlp-traces-endpoint traces requests": (
        "collect-detailed-traces", "enable-layerwise-nvtx-tracing", "profiler-config",
    ),
    _LORA: (
        "enable-lora-bias", "lora-extra-vocab-size", "long-lora-scaling-factors", "fully-sharded-loras",
        "default-mm-loras", "lora-target-modules", "specialize-active-lora", "enable-tower-connector-lora",
        "qlora-adapter-name-or-path",
    ),
    _PROMPT_ADAPTERS: (
        "enable-prompt-adapter", "max-prompt-adapters", "max-prompt-adapter-token", "prompt-adapters",
    ),
    _LOADER: (
        "safetensors-load-strategy", "model-loader-extra-config", "ignore-patterns", "pt-load-map-location",
    ),
    _STRUCTURED: (
        "guided-decoding-disable-any-whitespace", "guided-decoding-disable-additional-properties",
    ),
    _LOGS: ("enable-log-outputs", "enable-log-deltas"),
    _KERNELS: ("moe-backend", "linear-backend", "kernel-config", "ir-op-priority"),
    _STATIC: ("h11-max-incomplete-event-size", "h11-max-header-count"),
    "there is no Ray: --nnodes spreads ranks over nodes": ("ray-workers-use-nsight", "worker-use-ray"),
    "the system places processes: start the server under numactl": (
        "numa-bind", "numa-bind-nodes", "numa-bind-cpus",
    ),
    "tokenizers run in the API's processes: --api-server-count": (
        "tokenizer-pool-size", "tokenizer-pool-type", "tokenizer-pool-extra-config", "renderer-num-workers",
    ),
    "a sequence's KV lies whole with each rank of a stage": (
        "dcp-comm-backend", "dcp-kv-cache-interleave-size", "cp-kv-cache-interleave-size",
    ),
    "answers carry one fingerprint": ("fingerprint-mode", "fingerprint-value"),
    "there is no dialect of Cohere's": ("cohere-is-reasoning-model", "cohere-format"),
    "--reasoning-parser says how reasoning is marked": ("enable-reasoning", "reasoning-config"),
    "it is read from the model's configuration; change it there": ("rope-scaling", "rope-theta"),
    "the checkpoint says how it is quantized; --quantization and --isq quantize at load": (
        "quantization-config", "allow-deprecated-quantization", "quantization-param-path",
    ),
    "requests ask for it by the field of that name": ("return-tokens-as-token-ids", "stream-interval"),
}  # fmt: skip

UNSUPPORTED = {name: why for why, names in _BY_REASON.items() for name in names} | {
    "additional-config": "there is one platform, and --kernel pins what runs on it",
    "calculate-kv-scales": "an fp8 cache has the scales that the checkpoint was calibrated with",
    "code-revision": "a model's own code is never run",
    "convert": "use --runner pooling, or --runner generate",
    "default-chat-template-kwargs": "requests give chat_template_kwargs; a default belongs into --chat-template",
    "disable-access-log-for-endpoints": "--no-access-log leaves out every request's line",
    "disable-fastapi-docs": "/docs is always there; keep it away in the proxy",
    "disable-sliding-window": "layers keep their windows; --max-model-len bounds sequences",
    "distributed-timeout-seconds": "use --node-join-seconds",
    "download-dir": "set HF_HOME, or HF_HUB_CACHE: models are kept in the hub's cache",
    "enable-flash-late-interaction": "there are no models of late interaction",
    "enable-force-include-usage": "streams report usage where a request asks for it",
    "enable-prompt-embeds": "prompts are texts or token ids",
    "enable-return-routed-experts": "answers do not tell which experts were used",
    "exclude-tools-when-tool-choice-none": "leave tools out of the request",
    "fail-on-environ-validation": "an unknown STOKER_ variable is always an error",
    "guided-decoding-disable-fallback": "there is one compiler of grammars",
    "headless": "leave it out; nodes with a --node-rank above 0 answer no clients",
    "hf-config-path": "the configuration lies in the model's folder",
    "hf-overrides": "the model's configuration is used as it is; --pooler-config takes what rerankers need of it",
    "hf-token": "set HF_TOKEN, or log in with `hf auth login`: other users of the machine see command lines",
    "kv-cache-dtype-skip-layers": "--kv-cache-dtype is every layer's",
    "kv-cache-memory-bytes": "use --num-gpu-blocks, or --gpu-memory-utilization",
    "kv-sharing-fast-prefill": "every layer computes the whole prompt",
    "kv-transfer-config": "prefill and decode run in one engine",
    "log-config-file": "use --log-level and --log-json",
    "log-error-stack": "a failure of the server's own is always logged with its traceback",
    "max-log-len": "prompts are never logged",
    "multi-step-stream-outputs": "every token is streamed as it comes",
    "override-attention-dtype": "attention is in the model's type; see --dtype",
    "override-generation-config": "change the model's generation_config.json, or use --generation-config none",
    "override-neuron-config": "there is no Neuron device; see --device",
    "scheduler-reserve-full-isl": "a prompt gets pages as its chunks are computed",
    "shutdown-timeout": "use --drain-seconds",
    "skip-tokenizer-init": "leave it out: requests may bring token ids beside a tokenizer",
    "tokenizer-revision": "fetch the tokenizer first, and give its folder as --tokenizer",
    "tokens-only": "leave it out: texts and token ids are served by the same routes",
    "tool-server": "clients run the tools",
    "uds": "use --host and --port",
    "uvicorn-log-level": "there is one log: use --log-level",
    "weight-transfer-config": "weights are loaded once; /sleep and /wake_up take and give back the memory",
}
"""Flag → what there is instead."""

SHORT = {
    "O": "optimization-level",
    "ac": "attention-config",
    "cc": "compilation-config",
    "dcp": "decode-context-parallel-size",
    "dpa": "data-parallel-address",
    "dpb": "data-parallel-backend",
    "dpe": "data-parallel-external-lb",
    "dph": "data-parallel-hybrid-lb",
    "dpl": "data-parallel-size-local",
    "dpn": "data-parallel-rank",
    "dpp": "data-parallel-rpc-port",
    "dpr": "data-parallel-start-rank",
    "pcp": "prefill-context-parallel-size",
    "spec-draft-tp": "speculative-draft-tensor-parallel-size",
}
"""vLLM's short names of flags that are no settings: they are refused with the long one."""
