"""The flags that `vllm serve --help` has had between its versions 0.8 and 0.2x, written down by hand."""

_WORDS = """
additional-config aggregate-engine-logging all2all-backend allow-credentials allow-deprecated-quantization
allowed-headers allowed-local-media-path allowed-media-domains allowed-methods allowed-origins api-key
api-server-count async-scheduling attention-backend attention-config block-size calculate-kv-scales chat-template
chat-template-content-format code-revision cohere-format cohere-is-reasoning-model collect-detailed-traces
compilation-config config config-format convert cp-kv-cache-interleave-size cpu-offload-gb cpu-offload-params
cuda-graph-sizes cudagraph-capture-sizes cudagraph-metrics data-parallel-address data-parallel-backend
data-parallel-external-lb data-parallel-hybrid-lb data-parallel-rank data-parallel-rpc-port data-parallel-size
data-parallel-size-local data-parallel-start-rank data-parallel-supervisor-port dbo-decode-token-threshold
dbo-prefill-token-threshold dcp-comm-backend dcp-kv-cache-interleave-size decode-context-parallel-size
default-chat-template-kwargs default-mm-loras device disable-access-log-for-endpoints disable-async-output-proc
disable-cascade-attn disable-chunked-mm-input disable-custom-all-reduce disable-fastapi-docs
disable-frontend-multiprocessing disable-hybrid-kv-cache-manager disable-log-requests disable-log-stats
disable-logprobs-during-spec-decoding disable-mm-preprocessor-cache disable-nccl-for-dp-synchronization
disable-sliding-window disable-uvicorn-access-log distributed-executor-backend distributed-timeout-seconds
download-dir dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s dtype
ec-transfer-config enable-auto-tool-choice enable-chunked-prefill enable-dbo enable-elastic-ep enable-ep-weight-filter
enable-eplb enable-expert-parallel enable-flash-late-interaction enable-flashinfer-autotune enable-force-include-usage
enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs enable-log-requests
enable-logging-iteration-details enable-lora enable-lora-bias enable-mfu-metrics enable-mm-embeds
enable-multimodal-encoder-data-parallel enable-offline-docs enable-per-request-metrics enable-prefix-caching
enable-prompt-adapter enable-prompt-embeds enable-prompt-tokens-details enable-reasoning enable-request-id-headers
enable-return-routed-experts enable-server-load-tracking enable-sleep-mode enable-ssl-refresh
enable-tokenizer-info-endpoint enable-tower-connector-lora enforce-eager eplb-config eplb-log-balancedness
eplb-step-interval eplb-window-size exclude-tools-when-tool-choice-none expert-placement-strategy
fail-on-environ-validation fingerprint-mode fingerprint-value fully-sharded-loras gdn-prefill-backend
generation-config gpu-memory-utilization guided-decoding-backend guided-decoding-disable-additional-properties
guided-decoding-disable-any-whitespace guided-decoding-disable-fallback h11-max-header-count
h11-max-incomplete-event-size headless hf-config-path hf-overrides hf-token host ignore-patterns interleave-mm-strings
io-processor-plugin ir-op-priority kernel-config kv-cache-dtype kv-cache-dtype-skip-layers kv-cache-memory-bytes
kv-cache-metrics kv-cache-metrics-sample kv-events-config kv-offloading-backend kv-offloading-size
kv-sharing-fast-prefill kv-transfer-config language-model-only limit-mm-per-prompt linear-backend load-format
log-config-file log-error-stack logits-processor-pattern logits-processors logprobs-mode long-lora-scaling-factors
long-prefill-token-threshold lora-dtype lora-extra-vocab-size lora-modules lora-target-modules mamba-backend
mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-ssm-cache-dtype master-addr master-port max-cpu-loras
max-cudagraph-capture-size max-log-len max-logprobs max-long-partial-prefills max-lora-rank max-loras max-model-len
max-num-batched-tokens max-num-partial-prefills max-num-seqs max-parallel-loading-workers max-prompt-adapter-token
max-prompt-adapters max-seq-len-to-capture media-io-kwargs middleware mm-encoder-attn-backend mm-encoder-attn-dtype
mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path mm-encoder-only
mm-encoder-tp-mode mm-processor-cache-gb mm-processor-cache-type mm-processor-kwargs mm-shm-cache-max-object-size-mb
mm-tensor-ipc model model-impl model-loader-extra-config moe-backend multi-step-stream-outputs ngram-prompt-lookup-max
ngram-prompt-lookup-min nnodes node-rank num-gpu-blocks-override num-lookahead-slots num-redundant-experts
num-scheduler-steps num-speculative-tokens numa-bind numa-bind-cpus numa-bind-nodes offload-backend offload-group-size
offload-num-in-group offload-params offload-prefetch-step optimization-level otlp-traces-endpoint
override-attention-dtype override-generation-config override-neuron-config override-pooler-config performance-mode
pipeline-parallel-size pooler-config port preemption-mode prefill-context-parallel-size prefix-caching-hash-algo
profiler-config prompt-adapters pt-load-map-location qlora-adapter-name-or-path quantization quantization-config
quantization-param-path ray-workers-use-nsight reasoning-config reasoning-parser reasoning-parser-plugin
renderer-num-workers response-role return-tokens-as-token-ids revision root-path rope-scaling rope-theta runner
safetensors-load-strategy scheduler-cls scheduler-delay-factor scheduler-reserve-full-isl scheduling-policy seed
served-model-name show-hidden-metrics-for-version shutdown-timeout skip-mm-profiling skip-tokenizer-init
spec-decoding-acceptance-method specialize-active-lora speculative-config speculative-disable-by-batch-size
speculative-disable-mqa-scorer speculative-draft-tensor-parallel-size speculative-max-model-len speculative-model
speculative-model-quantization ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile stream-interval
structured-outputs-config swap-space task tensor-parallel-size tokenizer tokenizer-mode tokenizer-pool-extra-config
tokenizer-pool-size tokenizer-pool-type tokenizer-revision tokens-only tool-call-parser tool-parser-plugin tool-server
trust-remote-code trust-request-chat-template typical-acceptance-sampler-posterior-alpha
typical-acceptance-sampler-posterior-threshold ubatch-size uds use-tqdm-on-load use-v2-block-manager uvicorn-log-level
video-pruning-rate weight-transfer-config worker-cls worker-extension-cls worker-use-ray
"""
ARGUMENTS = _WORDS.split()
