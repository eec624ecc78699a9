"""The part of Envoy's configuration that changes with the models: which service gets a request, and what is said in its
place.

Invariants: pure. A request goes by the field `model` of its JSON body, and by nothing else that it says. What names no
model, or one that nobody serves, is refused with the reason; probes and the list of models are answered here and wake
nobody. With keys, whoever brings none of them learns nothing but that. A request that goes on to a service is counted
by a digest of its key.
Knows nothing of where pods are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from stoker_operator.gateway.models import Backend, Table
from stoker_operator.gateway.prefix import HEADER

Document = dict[str, Any]
TYPE = "type.googleapis.com/envoy."
ROUTES = "models"
NAMESPACE, FIELD = "stoker", "model"
KEYS_FILTER = "keys"
# What the filter of keys says of a request that it let in, and the name by which limits count it.
_WHOSE = {"key": "envoy.filters.http.rbac", "path": [{"key": "enforced_effective_policy_id"}]}
OWNER, NOBODY = "owner", "nobody"
PROBES = ("/health", "/ping")
_LARGEST_ANSWER = 16 << 20
_ASKED = f"%DYNAMIC_METADATA({NAMESPACE}:{FIELD})%"
_UNKNOWN = f"The model '{_ASKED}' is not served here. GET /v1/models lists those that are."
_UNNAMED = "The gateway sends a request on by the field model of its JSON body, and this one names none."
_JSON = [
    {"header": {"key": "content-type", "value": "application/json"}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
]


def route_configuration(table: Table, keys: tuple[str, ...] | None) -> Document:
    """All routes. `keys`: those that are let in; None, everybody is."""
    models = sorted(table.models.items())
    listed = [_model(name, backend) for name, backend in models]
    routes = [
        *(_answer({"path": path}, 200, {"status": "ok"}, free=True) for path in PROBES),
        _answer({"path": "/v1/models"}, 200, {"object": "list", "data": listed}),
        *(_answer({"path": f"/v1/models/{item['id']}"}, 200, item) for item in listed),
        *(_to_service(name, backend) for name, backend in models),
        _refusal("/v1/messages", 404, anthropic_error("not_found_error", _UNKNOWN), named=True),
        _refusal("/", 404, openai_error("invalid_request_error", _UNKNOWN, "model_not_found"), named=True),
        _refusal("/v1/messages", 400, anthropic_error("invalid_request_error", _UNNAMED)),
        _refusal("/", 400, openai_error("invalid_request_error", _UNNAMED, "model_required")),
    ]
    host: Document = {"name": "all", "domains": ["*"], "routes": routes}
    if keys is not None:
        host["typed_per_filter_config"] = {KEYS_FILTER: _only(keys)}
    return {
        "@type": f"{TYPE}config.route.v3.RouteConfiguration",
        "name": ROUTES,
        "max_direct_response_body_size_bytes": _LARGEST_ANSWER,
        "virtual_hosts": [host],
    }


def openai_error(kind: str, text: str, code: str) -> Document:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": text, "type": kind, "param": "model" if "model" in code else None, "code": code}}


def anthropic_error(kind: str, text: str) -> Document:
    """An error as Anthropic's clients read it."""
    return {"type": "error", "error": {"type": kind, "message": text}}


def _model(name: str, backend: Backend) -> Document:
    return {"id": name, "object": "model", "created": backend.created, "owned_by": "stoker"}


def _to_service(name: str, backend: Backend) -> Document:
    """A request is sent again only where no pod has begun on it."""
    action = {
        "cluster": backend.cluster,
        "timeout": "0s",
        "hash_policy": [{"header": {"header_name": HEADER}}],
        "rate_limits": [{"actions": [{"metadata": _owner()}]}],
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset-before-request",
            "num_retries": 2,
            "retry_host_predicate": [
                {
                    "name": "another",
                    "typed_config": {"@type": f"{TYPE}extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"},
                }
            ],
            "host_selection_retry_max_attempts": 4,
        },
    }
    return {"match": {"prefix": "/", "dynamic_metadata": [_said({"exact": name})]}, "route": action}


def _owner() -> Document:
    """Where nobody is asked for a key, all are one."""
    return {"descriptor_key": OWNER, "metadata_key": _WHOSE, "source": "DYNAMIC", "default_value": NOBODY}


def _said(value: Mapping[str, Any]) -> Document:
    """That the body's model is such a text."""
    return {"filter": NAMESPACE, "path": [{"key": FIELD}], "value": {"string_match": dict(value)}}


def _answer(match: Document, status: int, body: Document, *, free: bool = False) -> Document:
    """`free`: without a key, too."""
    found: Document = {
        "match": match,
        "direct_response": {"status": status, "body": {"inline_string": json.dumps(body)}},
        "response_headers_to_add": _JSON,
    }
    if free:
        found["typed_per_filter_config"] = {KEYS_FILTER: _everybody()}
    return found


def _refusal(prefix: str, status: int, body: Document, *, named: bool = False) -> Document:
    """`named`: of requests that name a model. The name is escaped as JSON has it."""
    match: Document = {"prefix": prefix}
    if named:
        match["dynamic_metadata"] = [_said({"safe_regex": {"regex": "(?s).+"}})]
    return {"match": match, "direct_response": {"status": status, "body_format": {"json_format": body}}}


def _only(keys: Iterable[str]) -> Document:
    """Whoever brings one of the keys, as OpenAI's clients do or as Anthropic's do."""
    policies = {
        _digest(key): {
            "permissions": [{"any": True}],
            "principals": [
                {"header": {"name": name, "string_match": {"exact": text}}}
                for name, text in (("authorization", f"Bearer {key}"), ("x-api-key", key))
            ],
        }
        for key in keys
    }
    return {
        "@type": f"{TYPE}extensions.filters.http.rbac.v3.RBACPerRoute",
        "rbac": {"rules": {"action": "ALLOW", "policies": policies}},
    }


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _everybody() -> Document:
    return {"@type": f"{TYPE}extensions.filters.http.rbac.v3.RBACPerRoute"}
