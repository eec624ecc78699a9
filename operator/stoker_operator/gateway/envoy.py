"""Envoy's configuration: how it starts, how it listens, and where the services' pods are.

Envoy follows files (its xDS by the file system), each a document with `resources`; what changes seldom or never is in
documents of its own, so that a pod that comes or goes, or a model, breaks no connection.
Invariants: pure. Envoy never cuts an answer by time and never sends a request twice that a pod may have begun on; its
own interface is on loopback.
Knows nothing of who writes the files, and of which model is whose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from stoker_operator.gateway.models import Backend
from stoker_operator.gateway.prefix import SCRIPT
from stoker_operator.gateway.routes import (
    FIELD,
    KEYS_FILTER,
    NAMESPACE,
    OWNER,
    ROUTES,
    TYPE,
    anthropic_error,
    openai_error,
)
from stoker_operator.gateway.settings import GatewaySettings

Document = dict[str, Any]
START, LISTENERS, ROUTE_FILE, CLUSTERS = "envoy.json", "listeners.json", "routes.json", "clusters.json"
NOTHING: Document = {"resources": []}
MIB = 1 << 20
# A request in the pod's own queue is still one, and a pod may be slow to begin.
_MANY = 1_000_000
# Below what servers keep idle connections for, so that no request meets one that is being closed.
_IDLE_SECONDS = 2
_SILENT_SECONDS = 3600
# Keys that are counted each by itself; beyond, whoever was away longest is forgotten.
_MOST_KEYS = 65536
_FILTER = f"{TYPE}extensions.filters.http."


def endpoints_file(cluster: str) -> str:
    """The name of the file that says where a service's pods are."""
    return f"endpoints-{cluster}.json"


def start_document(settings: GatewaySettings) -> Document:
    """What Envoy is started with: its own interface, the way to its figures, and where the rest stands."""
    folder = PurePosixPath(settings.folder)
    admin = ("127.0.0.1", settings.admin_port)
    figures = {
        "name": "figures",
        "domains": ["*"],
        "routes": [{"match": {"path": "/stats/prometheus"}, "route": {"cluster": "itself"}}],
    }
    manager = {
        "@type": f"{TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "figures",
        "route_config": {"virtual_hosts": [figures]},
        "http_filters": [_router()],
    }
    return {
        "node": {"id": "gateway", "cluster": "stoker"},
        "admin": {"address": _address(*admin)},
        "dynamic_resources": {
            "lds_config": _file(folder, LISTENERS),
            "cds_config": _file(folder, CLUSTERS),
        },
        "static_resources": {
            "listeners": [_listener("figures", settings.host or "0.0.0.0", settings.metrics_port, manager)],
            "clusters": [{"name": "itself", "type": "STATIC", "load_assignment": _assignment("itself", [admin])}],
        },
    }


def listener_document(settings: GatewaySettings) -> Document:
    """How clients are heard."""
    manager = {
        "@type": f"{TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "rds": {"route_config_name": ROUTES, "config_source": _file(PurePosixPath(settings.folder), ROUTE_FILE)},
        "http_filters": [
            _keys(),
            _model_of_body(),
            *_limit(settings.requests_per_minute),
            _prefix_of_body(),
            _router(),
        ],
        "use_remote_address": True,
        "preserve_external_request_id": True,
        "server_header_transformation": "PASS_THROUGH",
        "normalize_path": True,
        "merge_slashes": True,
        "stream_idle_timeout": f"{_SILENT_SECONDS}s",
        "local_reply_config": {"mappers": [*_too_many(settings.requests_per_minute), *_refusals(settings.body_mib)]},
    }
    listener = _listener("clients", settings.host or "0.0.0.0", settings.port, manager)
    listener["@type"] = f"{TYPE}config.listener.v3.Listener"
    listener["per_connection_buffer_limit_bytes"] = settings.body_mib * MIB
    return _resources([listener])


def cluster_document(backends: Iterable[Backend], settings: GatewaySettings) -> Document:
    """The services: their pods are chosen by what a request begins with, within a bound on each pod's share."""
    folder = PurePosixPath(settings.folder)
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), _MANY)
    protocol = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    found = []
    for name in (each.cluster for each in backends):
        choice = {
            "@type": f"{TYPE}extensions.load_balancing_policies.ring_hash.v3.RingHash",
            "consistent_hashing_lb_config": {"hash_balance_factor": 125},
        }
        found.append(
            {
                "@type": f"{TYPE}config.cluster.v3.Cluster",
                "name": name,
                "type": "EDS",
                "connect_timeout": "3s",
                "eds_cluster_config": {"service_name": name, "eds_config": _file(folder, endpoints_file(name))},
                "circuit_breakers": {"thresholds": [limits]},
                "load_balancing_policy": {
                    "policies": [{"typed_extension_config": {"name": "by-prefix", "typed_config": choice}}]
                },
                "typed_extension_protocol_options": {
                    protocol: {
                        "@type": f"type.googleapis.com/{protocol}",
                        "common_http_protocol_options": {"idle_timeout": f"{_IDLE_SECONDS}s"},
                        "explicit_http_config": {"http_protocol_options": {}},
                    }
                },
            }
        )
    return _resources(found)


def route_document(routes: Document) -> Document:
    """The file of the routes."""
    return _resources([routes])


def endpoint_document(backend: Backend) -> Document:
    """Where one service's requests go now."""
    found = _assignment(backend.cluster, backend.endpoints)
    return _resources([{"@type": f"{TYPE}config.endpoint.v3.ClusterLoadAssignment"} | found])


def _resources(items: list[Document]) -> Document:
    return {"resources": items}


def _file(folder: PurePosixPath, name: str) -> Document:
    """Envoy follows the file by its folder, into which it is moved whole."""
    source = {"path": str(folder / name), "watched_directory": {"path": str(folder)}}
    return {"path_config_source": source, "resource_api_version": "V3"}


def _address(host: str, port: int) -> Document:
    return {"socket_address": {"address": host, "port_value": port}}


def _assignment(name: str, endpoints: Iterable[tuple[str, int]]) -> Document:
    there = [{"endpoint": {"address": _address(*each)}} for each in endpoints]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": there}]}


def _listener(name: str, host: str, port: int, manager: Document) -> Document:
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {"name": name, "address": _address(host, port), "filter_chains": [chain]}


def _keys() -> Document:
    """Lets everybody in; the routes say whom."""
    return {"name": KEYS_FILTER, "typed_config": {"@type": f"{_FILTER}rbac.v3.RBAC"}}


def _model_of_body() -> Document:
    """The body's field `model`, or "" where there is none, or no JSON."""
    place = {"metadata_namespace": NAMESPACE, "key": FIELD}
    rule = {
        "selectors": [{"key": FIELD}],
        "on_present": place,
        "on_missing": place | {"value": ""},
        "on_error": place | {"value": ""},
    }
    config = {"@type": f"{_FILTER}json_to_metadata.v3.JsonToMetadata"}
    return {
        "name": "model",
        "typed_config": config | {"request_rules": {"rules": [rule], "allow_empty_content_type": True}},
    }


def _limit(per_minute: int) -> Iterable[Document]:
    """A bucket for each key that holds a minute's requests and fills evenly. It stands in no document that changes with
    models or keys, so that none of these changes fills it.
    """
    if not per_minute:
        return
    bucket = {"max_tokens": per_minute, "tokens_per_fill": per_minute, "fill_interval": "60s"}
    everything = {"default_value": {"numerator": 100}, "runtime_key": "stoker.never"}
    yield {
        "name": "limit",
        "typed_config": {
            "@type": f"{_FILTER}local_ratelimit.v3.LocalRateLimit",
            "stat_prefix": "limit",
            "filter_enabled": everything,
            "filter_enforced": everything,
            "always_consume_default_token_bucket": False,
            "max_dynamic_descriptors": _MOST_KEYS,
            # Without a value: each that comes has a bucket of its own.
            "descriptors": [{"entries": [{"key": OWNER}], "token_bucket": bucket}],
        },
    }


def _prefix_of_body() -> Document:
    config = {"@type": f"{_FILTER}lua.v3.Lua", "default_source_code": {"inline_string": SCRIPT}}
    return {"name": "prefix", "typed_config": config}


def _router() -> Document:
    return {"name": "router", "typed_config": {"@type": f"{_FILTER}router.v3.Router"}}


def _too_many(per_minute: int) -> Iterable[Document]:
    """What is said beyond the limit, in either dialect. A bucket that is empty has a request's worth after so long."""
    if not per_minute:
        return
    seconds = math.ceil(60 / per_minute)
    text = f"The rate limit is reached: {per_minute} requests a minute. Try again in {seconds}s."
    limited: Document = {"status_code_filter": {"comparison": _equals(429)}}
    messages = {"header_filter": {"header": {"name": ":path", "string_match": {"prefix": "/v1/messages"}}}}
    for chosen, body in (
        ({"and_filter": {"filters": [limited, messages]}}, anthropic_error("rate_limit_error", text)),
        (limited, openai_error("rate_limit_error", text, "rate_limit_exceeded")),
    ):
        yield {
            "filter": chosen,
            "body_format_override": {"json_format": body},
            "headers_to_add": [{"header": {"key": "retry-after", "value": str(seconds)}}],
        }


def _equals(status: int) -> Document:
    return {"op": "EQ", "value": {"default_value": status, "runtime_key": "stoker.never"}}


def _refusals(body_mib: int) -> Iterable[Document]:
    """What Envoy itself answers, in words of ours. 403 is the filter of keys: clients know it as 401."""
    large = f"The body is larger than {body_mib} MiB, the most that the gateway takes."
    nobody = "No pod of the model is ready to answer, and nobody holds its requests."
    for status, told, body, header in (
        (403, 401, openai_error("authentication_error", "The API key is missing or wrong.", "invalid_api_key"),
         ("www-authenticate", "Bearer")),
        (413, 413, openai_error("invalid_request_error", large, "body_too_large"), None),
        (503, 503, openai_error("service_unavailable", nobody, "no_pod_ready"), ("retry-after", "5")),
    ):  # fmt: skip
        found: Document = {
            "filter": {"status_code_filter": {"comparison": _equals(status)}},
            "status_code": told,
            "body_format_override": {"json_format": body},
        }
        if header is not None:
            found["headers_to_add"] = [{"header": {"key": header[0], "value": header[1]}}]
        yield found
