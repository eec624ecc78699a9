"""The settings of `stoker serve` that are of the server around the engine: port, keys, limits, TLS, bounds, logs.

Invariants: as in flags.py, of whose table this is the end.
Knows nothing of the engine's settings.
"""

from __future__ import annotations

from stoker_runtime.config import LOG_LEVELS
from stoker_runtime.settings.flag import SERVER, Flag
from stoker_runtime.settings.media import host, image_limit
from stoker_runtime.settings.values import choice, integer, number, switch, text

SERVER_FLAGS: tuple[Flag, ...] = (
    Flag("host", "host", text, SERVER, "address to listen on", "ADDRESS"),
    Flag("port", "port", integer(0), SERVER, "port to listen on; 0: any free one", "PORT"),
    Flag("api-key", "api_keys", text, SERVER, "key that clients must send; repeatable", "KEY", many=True, secret=True),
    Flag(
        "api-key-file",
        "api_key_file",
        text,
        SERVER,
        "file of API keys, their name=, expires=, quota=, rpm=, tpm=; read on change",
        "FILE",
    ),
    Flag(
        "rate-limit-requests-per-minute",
        "rate_limit_requests_per_minute",
        integer(0),
        SERVER,
        "requests a minute of each API key, or of all without keys; 0: any",
        "N",
    ),
    Flag(
        "rate-limit-tokens-per-minute",
        "rate_limit_tokens_per_minute",
        integer(0),
        SERVER,
        "tokens a minute, of prompts and answers, likewise",
        "N",
    ),
    Flag("ssl-certfile", "ssl_certfile", text, SERVER, "TLS certificate chain, PEM; loaded again on change", "FILE"),
    Flag("ssl-keyfile", "ssl_keyfile", text, SERVER, "TLS private key, PEM", "FILE"),
    Flag("ssl-ca-certs", "ssl_ca_certs", text, SERVER, "authorities of the clients' certificates, PEM", "FILE"),
    Flag(
        "ssl-cert-reqs", "ssl_cert_reqs", integer(0), SERVER, "client certificate: 0 none, 1 optional, 2 required", "N"
    ),
    Flag(
        "ssl-probes-without-cert",
        "ssl_probes_without_cert",
        switch,
        SERVER,
        "with --ssl-cert-reqs 2: probes and metrics need no certificate",
    ),
    Flag("ssl-ciphers", "ssl_ciphers", text, SERVER, "TLS 1.2 ciphers, as OpenSSL spells them", "LIST"),
    Flag("allowed-origins", "allowed_origins", text, SERVER, "CORS: origins of pages", "ORIGIN", many=True, words=True),
    Flag("allowed-methods", "allowed_methods", text, SERVER, "CORS: methods", "METHOD", many=True, words=True),
    Flag(
        "allowed-headers", "allowed_headers", text, SERVER, "CORS: headers of requests", "NAME", many=True, words=True
    ),
    Flag("allow-credentials", "allow_credentials", switch, SERVER, "CORS: let pages send cookies and keys"),
    Flag(
        "api-server-count",
        "api_server_count",
        integer(1),
        SERVER,
        "processes that speak HTTP, in front of one engine",
        "N",
        aliases=("asc",),
    ),
    Flag(
        "limit-mm-per-prompt",
        "image_limit",
        image_limit,
        SERVER,
        'most images of one prompt, as image=4 or {"image": 4}; none: all that fit',
        "LIMITS",
    ),
    Flag(
        "allowed-media-domains",
        "allowed_media_domains",
        host,
        SERVER,
        "hosts that images may be fetched from; none: images come as data: URLs",
        "HOST",
        many=True,
        words=True,
    ),
    Flag("request-timeout", "request_timeout", number(0.0), SERVER, "longest time of a request; 0: none", "SECONDS"),
    Flag("max-body-bytes", "max_body_bytes", integer(1), SERVER, "largest request body; 32M is 32 MiB", "BYTES"),
    Flag(
        "response-store-bytes",
        "response_store_bytes",
        integer(0),
        SERVER,
        "memory for stored answers of /v1/responses; 0: none",
        "BYTES",
    ),
    Flag("batch-dir", "batch_dir", text, SERVER, "folder for /v1/files and /v1/batches; none: they are off", "FOLDER"),
    Flag("batch-concurrency", "batch_concurrency", integer(1), SERVER, "lines of batches that run at a time", "N"),
    Flag("max-file-bytes", "max_file_bytes", integer(1), SERVER, "largest file for /v1/files", "BYTES"),
    Flag("drain-seconds", "drain_seconds", number(0.0), SERVER, "time for running streams after SIGTERM", "SECONDS"),
    Flag(
        "access-log",
        "access_log",
        switch,
        SERVER,
        "log a line for each request",
        opposites=("disable-uvicorn-access-log",),
    ),
    Flag(
        "enable-log-requests",
        "log_requests",
        switch,
        SERVER,
        "log parameters and token counts of each request, no text",
        opposites=("disable-log-requests",),
    ),
    Flag(
        "otlp-traces-endpoint",
        "otlp_traces_endpoint",
        text,
        SERVER,
        "OpenTelemetry collector that gets a trace of each request",
        "URL",
    ),
    Flag("log-level", "log_level", choice(LOG_LEVELS), SERVER, "least severe messages to log", "|".join(LOG_LEVELS)),
    Flag("log-json", "log_json", switch, SERVER, "log JSON objects instead of lines"),
    Flag("config", "", text, SERVER, "TOML or YAML file with any of these settings", "FILE"),
)
