"""Configuration: frozen, validated once; `resolve_*` functions return a new one in which no "auto" is left.

Precedence: flag over `STOKER_*` environment variable over config file over default.
Invariants: an `EngineConfig` crosses a process boundary by pickle, so it holds plain data only; a secret
(`api_keys`) is never part of `repr`.
Knows nothing of torch: dtypes and devices are names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker_runtime.drafts.settings import NAME, Drafting, read_drafting
from stoker_runtime.errors import ConfigError
from stoker_runtime.kv_events_settings import KvEventsConfig
from stoker_runtime.nodes import NodeSettings

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "fp8")
DEVICES = ("auto", "cuda", "cpu")
# What weights are quantized to at load, "gguf" to keep a file's blocks, or the method that a checkpoint was
# quantized by, which has to be that.
CHECKPOINT_METHODS = ("awq", "gptq", "compressed-tensors", "fbgemm_fp8", "modelopt", "mxfp4")
QUANTIZATIONS = ("auto", "none", "fp8", "w4", "gguf", *CHECKPOINT_METHODS)
# What `isq` makes of 16 bits; the last ones are GGUF's blocks.
ISQ_BLOCKS = ("q8_0", "q4k")
ISQ_KINDS = ("none", "fp8", "w4", *ISQ_BLOCKS)
QUANTIZED_HEADS = ("none", "fp8")
QUANTIZED_EMBEDDINGS = ("none", "q8_0")
POLICIES = ("fcfs", "priority", "sjf")
LOG_LEVELS = ("debug", "info", "warning", "error")
GENERATION_CONFIGS = ("auto", "none")
RUNNERS = ("auto", "generate", "pooling")
MAX_API_SERVERS = 64
MAX_LORAS, MAX_LORA_RANK = 64, 256


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter under its clients' name. `parent` is what /v1/models calls its base model; "": the server's."""

    name: str
    path: str
    parent: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


@dataclass(frozen=True, slots=True)
class EngineConfig(NodeSettings):
    """Everything the engine process needs. Sizes are tokens, pages or GiB as named.

    `model` is a folder of safetensors, or a .gguf file; or `shape:NAME` for random weights of a known shape, or of
    `shape:FOLDER`'s config.json. Until it is located (`fetch/by_name.py`) it may be a name of the hub, of which
    `revision` is a branch, tag or commit.
    `max_model_len`, `max_num_seqs`, `max_num_batched_tokens`, `page_size`, `num_gpu_blocks`: 0 = decided at start.
    `num_gpu_blocks` counts KV pages of `page_size` tokens on the device, whichever device it is. `num_cpu_blocks`
    pages, or as many as `swap_space` GiB hold, are a pool in host memory for the KV of preempted sequences and evicted
    prefixes; 0: none. As many layers' experts as `cpu_offload_experts` GiB hold rest in host memory.
    Of models whose layers keep states, those of `num_state_snapshots` prefixes are kept; 0: by `max_num_seqs`.
    `cpu_threads` compute on a CPU; 0: as many as this process may run at once and its work keeps busy.
    `quantize_head` is what the output head becomes at load, tied or not, and `quantize_embedding` what the embedding
    does, a head tied to it as well. `isq` is `quantization` at load with no more than a few matrices in 16 bits on the
    device at any time.
    `kernels` pins implementations: {"linear": "cublas"}. `kv_events_config` None publishes nothing of the prefix cache.
    `runner` "auto" goes by the model's files; "pooling" makes a decoder embed. `pooler_config` is a JSON object that
    wins over the model's own settings: pooling_type, normalize, matryoshka_dimensions.
    `tensor_parallel_size` ranks share each layer, `pipeline_parallel_size` stages share the layers. What is counted on
    a device or a host (`gpu_memory_reserve_gb`, `cpu_kv_gb`, `swap_space`, `cpu_offload_experts`) counts for each rank,
    and so do pages, of which each rank holds its heads of its layers. With `enable_expert_parallel` the ranks of a
    stage share a mixture's experts whole, and not each of them. `disable_custom_all_reduce` leaves all sums over GPUs
    to NCCL. A server runs `data_parallel_size` engines beside each other, each on ranks of its own; this one is
    `data_parallel_rank`.
    With `enable_lora` a step has rows of up to `max_loras` adapters of up to `max_lora_rank` ranks, and the host holds
    `max_cpu_loras` (0: `max_loras`), at first `lora_modules`. `lora_embeddings` makes room for the ends of the model.
    `speculative_config` is a JSON object in vLLM's words that has steps verify drafts of the next tokens; "": none.
    `disable_hybrid_kv_cache_manager`: layers with a window keep the pages of whole sequences, as the others do.
    `disable_cascade_attn` unset: decode rows attend together what all of them begin with, where it pays.
    `enable_sleep_mode`: what the model has of the device can be given back for a while, and taken again.
    `batch_invariant`: a request's logits are the same bits whatever runs beside it, and however it is scheduled.
    `language_model_only`: a model that sees is served as one of text, without its vision tower.
    `tune`: products are measured on the GPU at the start, once, and the fastest tiles kept for later ones.
    """

    model: str
    revision: str = ""
    tokenizer: str = ""
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = "auto"
    quantize_head: str = "none"
    quantize_embedding: str = "none"
    isq: str = "none"
    device: str = "auto"
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    num_state_snapshots: int = 0
    max_queued: int = 4096
    page_size: int = 0
    num_gpu_blocks: int = 0
    num_cpu_blocks: int = 0
    swap_space: float = 0.0
    cpu_offload_experts: float = 0.0
    gpu_memory_utilization: float = 0.9
    gpu_memory_reserve_gb: float = 0.0
    cpu_kv_gb: float = 1.0
    cpu_threads: int = 0
    scheduling_policy: str = "fcfs"
    enable_prefix_caching: bool = True
    disable_hybrid_kv_cache_manager: bool = False
    disable_cascade_attn: bool = False
    enforce_eager: bool = False
    batch_invariant: bool = False
    enable_sleep_mode: bool = False
    language_model_only: bool = False
    tune: bool = False
    seed: int = 0
    runner: str = "auto"
    pooler_config: str = ""
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int = 0
    lora_embeddings: bool = False
    lora_modules: tuple[LoraModule, ...] = ()
    speculative_config: str = ""
    kernels: tuple[tuple[str, str], ...] = ()
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    disable_custom_all_reduce: bool = False
    kv_events_config: KvEventsConfig | None = None
    data_parallel_size: int = 1
    data_parallel_rank: int = 0

    @property
    def ranks(self) -> int:
        """Processes, and on GPUs devices, that one engine's model runs on."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def all_ranks(self) -> int:
        """The ranks of all engines of the server."""
        return self.ranks * self.data_parallel_size

    @property
    def local_ranks(self) -> int:
        """Those of them that are on one machine."""
        return self.all_ranks // self.nnodes

    def gpu_of(self, rank: int) -> int:
        """Which GPU of its machine is that of a rank of this engine."""
        return (self.data_parallel_rank * self.ranks + rank) % self.local_ranks

    def validate(self) -> EngineConfig:
        """Return self, or raise ConfigError naming the key, its value and what is allowed."""
        choices = [
            ("dtype", self.dtype, DTYPES),
            ("kv_cache_dtype", self.kv_cache_dtype, KV_DTYPES),
            ("quantization", self.quantization, QUANTIZATIONS),
            ("quantize_head", self.quantize_head, QUANTIZED_HEADS),
            ("quantize_embedding", self.quantize_embedding, QUANTIZED_EMBEDDINGS),
            ("isq", self.isq, ISQ_KINDS),
            ("device", self.device, DEVICES),
            ("scheduling_policy", self.scheduling_policy, POLICIES),
            ("runner", self.runner, RUNNERS),
        ]
        for name, value, allowed in choices:
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}.", param=name)
        sizes = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_state_snapshots", "num_gpu_blocks",
                 "num_cpu_blocks", "swap_space", "cpu_offload_experts", "cpu_threads",
                 "gpu_memory_reserve_gb")  # fmt: skip
        counts = ("max_queued", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        for name, least in (*((name, 0) for name in sizes), *((name, 1) for name in counts)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}.", param=name)
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            told = f"data_parallel_rank is {self.data_parallel_rank} of {self.data_parallel_size} engines."
            raise ConfigError(told, param="data_parallel_rank")
        self.validate_nodes(self.ranks, self.data_parallel_size)
        if self.num_cpu_blocks and self.swap_space:
            raise ConfigError(
                "num_cpu_blocks and swap_space both size the host pool; give one of them.", param="num_cpu_blocks"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be in (0, 1].",
                param="gpu_memory_utilization",
            )
        if self.page_size not in (0, 16, 32, 64, 128):
            raise ConfigError(f"page_size is {self.page_size}; it must be 16, 32, 64 or 128.", param="page_size")
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "enable_expert_parallel shares experts among the ranks of tensor_parallel_size, which is 1; set it to "
                "2 or more, or leave --enable-expert-parallel out.",
                param="enable_expert_parallel",
            )
        self._validate_lora()
        if self.tune and self.all_ranks > 1:
            raise ConfigError("tune measures for one GPU; run stoker tune with the same flags first.", param="tune")
        if self.publishes_kv_events and self.data_parallel_size > 1:
            told = "kv_events_config tells of one engine's cache: it cannot go with data_parallel_size."
            raise ConfigError(told, param="kv_events_config")
        if self.publishes_kv_events and not self.enable_prefix_caching:
            told = "kv_events_config tells of the prefix cache: it needs enable_prefix_caching."
            raise ConfigError(told, param="kv_events_config")
        self._validate_drafting()
        return self

    @property
    def publishes_kv_events(self) -> bool:
        """Whether what the prefix cache gains and loses is published."""
        return self.kv_events_config is not None and self.kv_events_config.publishes

    @property
    def drafting(self) -> Drafting | None:
        """What `speculative_config` asks for."""
        return read_drafting(self.speculative_config)

    @property
    def host_loras(self) -> int:
        """Adapters that host memory holds."""
        return self.max_cpu_loras or self.max_loras

    def _validate_lora(self) -> None:
        if not self.enable_lora:
            for name in ("lora_modules", "lora_embeddings", "max_cpu_loras"):
                if getattr(self, name):
                    raise ConfigError(f"{name} needs enable_lora.", param=name)
            return
        if self.data_parallel_size > 1:
            raise ConfigError("enable_lora serves one engine's adapters: no data_parallel_size.", param="enable_lora")
        if self.runner == "pooling":
            raise ConfigError(
                "enable_lora serves adapters of models that generate, not of those that pool.", param="enable_lora"
            )
        bounds = (("max_loras", 1, MAX_LORAS), ("max_lora_rank", 1, MAX_LORA_RANK))
        for name, least, most in bounds:
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from {least} to {most}.", param=name)
        if self.max_cpu_loras and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras is {self.max_cpu_loras}; it must be at least max_loras ({self.max_loras}), because "
                "what is on the device comes from the host.",
                param="max_cpu_loras",
            )
        names = [module.name for module in self.lora_modules]
        for name in names:
            if not name or names.count(name) > 1:
                raise ConfigError(f"lora_modules names {name!r} twice, or not at all.", param="lora_modules")

    def _validate_drafting(self) -> None:
        if self.drafting is None:
            return
        if self.drafting.reads_states and self.pipeline_parallel_size > 1:
            raise ConfigError(f"{NAME}: a head reads all stages' states: no pipeline_parallel_size.", param=NAME)
        if self.runner == "pooling":
            raise ConfigError(
                "speculative_config is for models that generate, not for those that pool.", param="speculative_config"
            )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The whole of `stoker serve`: the engine's configuration and the HTTP side's.

    `chat_template` is a file or Jinja source; `trust_request_chat_template` lets a request bring its own, which may
    take as long as it likes. `generation_config` "auto" takes sampling defaults from the model's folder, "none" does
    not. `tool_call_parser` and `reasoning_parser` "auto" go by the chat template;
    `enable_auto_tool_choice` None allows it wherever a parser is known, True refuses to start without one.
    `response_store_bytes` bounds the answers of /v1/responses that are kept, by all API processes together; 0: none.
    `batch_dir` is the folder of /v1/files and /v1/batches, "" for none; `batch_concurrency` lines run at a time.
    `allow_runtime_lora_updating` lets callers load adapters from the server's folders, and unload them; the file
    `lora_modules_file` names adapters, and is followed while the server runs ("": none).
    `otlp_traces_endpoint` is the URL of an OpenTelemetry collector that gets a trace of each request; "": none.
    `rate_limit_requests_per_minute` and `rate_limit_tokens_per_minute` bound each API key, and where there are none
    the server; 0: no limit; the file of keys may say others. `request_timeout`, in seconds, bounds every request (0:
    none). `ssl_cert_reqs`: 0 asks clients for no certificate, 1 allows one, 2 wants one, signed by `ssl_ca_certs`;
    with `ssl_probes_without_cert` not from who asks probes alone.
    Images by URL are fetched from the hosts `allowed_media_domains` alone; a prompt has at most `image_limit` images
    (None: any number).
    """

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    ssl_ca_certs: str = ""
    ssl_cert_reqs: int = 0
    ssl_ciphers: str = ""
    ssl_probes_without_cert: bool = False
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    api_server_count: int = 1
    chat_template: str = ""
    trust_request_chat_template: bool = False
    generation_config: str = "auto"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    enable_auto_tool_choice: bool | None = None
    log_level: str = "info"
    log_json: bool = False
    access_log: bool = True
    log_requests: bool = False
    request_timeout: float = 0.0
    max_body_bytes: int = 32 * 1024 * 1024
    drain_seconds: float = 120.0
    response_store_bytes: int = 64 * 1024 * 1024
    batch_dir: str = ""
    batch_concurrency: int = 64
    max_file_bytes: int = 200 * 1024 * 1024
    allow_runtime_lora_updating: bool = False
    lora_modules_file: str = ""
    otlp_traces_endpoint: str = ""
    rate_limit_requests_per_minute: int = 0
    rate_limit_tokens_per_minute: int = 0
    allowed_media_domains: tuple[str, ...] = ()
    image_limit: int | None = None

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that clients may use; the first one is what answers and metrics carry."""
        return self.served_model_names or (self.engine.model,)

    def validate(self) -> ServerConfig:
        """Return self, or raise ConfigError naming the key, its value and what is allowed."""
        choices = [
            ("log_level", self.log_level, LOG_LEVELS),
            ("generation_config", self.generation_config, GENERATION_CONFIGS),
        ]
        for name, value, allowed in choices:
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}.", param=name)
        if any(not key or key != key.strip() for key in self.api_keys):
            raise ConfigError(
                "api_keys holds an empty key, or one with blanks around it, which no client can send; leave it out, or "
                "give a key.",
                param="api_keys",
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535.", param="port")
        bounds = (
            ("max_body_bytes", 1),
            ("response_store_bytes", 0),
            ("batch_concurrency", 1),
            ("max_file_bytes", 1),
            ("rate_limit_requests_per_minute", 0),
            ("rate_limit_tokens_per_minute", 0),
        )
        for name, least in bounds:
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}.", param=name)
        for name, number in (("drain_seconds", self.drain_seconds), ("request_timeout", self.request_timeout)):
            if number < 0:
                raise ConfigError(f"{name} is {number}; it must be at least 0.", param=name)
        if not 1 <= self.api_server_count <= MAX_API_SERVERS:
            raise ConfigError(
                f"api_server_count is {self.api_server_count}; it must be between 1 and {MAX_API_SERVERS}.",
                param="api_server_count",
            )
        self._validate_tls()
        self.engine.validate()
        for name in ("allow_runtime_lora_updating", "lora_modules_file"):
            if getattr(self, name) and not self.engine.enable_lora:
                raise ConfigError(f"{name} needs enable_lora.", param=name)
        taken = [module.name for module in self.engine.lora_modules if module.name in self.model_names]
        if taken:
            raise ConfigError(f"lora_modules names {taken[0]!r}, which is the model's own name.", param="lora_modules")
        return self

    def _validate_tls(self) -> None:
        if not self.ssl_certfile:
            for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"):
                if getattr(self, name):
                    raise ConfigError(f"{name} needs a certificate: give ssl_certfile too.", param=name)
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs is {self.ssl_cert_reqs}; it must be 0, 1 or 2.", param="ssl_cert_reqs")
        if self.ssl_probes_without_cert and self.ssl_cert_reqs != 2:
            raise ConfigError(
                "ssl_probes_without_cert is an exception from ssl_cert_reqs 2, without which nobody needs one.",
                param="ssl_probes_without_cert",
            )
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("ssl_cert_reqs needs the authorities to trust: ssl_ca_certs.", param="ssl_cert_reqs")
