"""Who asks: the front proxy's client certificate vouches for the user, the API server says what the user may do.

Invariants: a user's name is believed only over a connection with a client certificate of the request header
authority and, where the API server restricts them, an allowed name; a verdict is kept for seconds only.
Knows nothing of metrics.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker_operator.cluster.api import Cluster
from stoker_operator.cluster.kinds import ACCESS_REVIEW, CONFIG_MAP
from stoker_operator.metrics_adapter.certificate import Pair

_NAMESPACE, _NAME = "kube-system", "extension-apiserver-authentication"
VERDICT_SECONDS = 30.0
_MOST_VERDICTS = 1024


class Unauthenticated(Exception):
    """The request does not come through the API server."""


@dataclass(frozen=True, slots=True)
class FrontProxy:
    """What the API server publishes of its front proxy."""

    authority: str
    allowed_names: tuple[str, ...]
    user_headers: tuple[str, ...]
    group_headers: tuple[str, ...]

    def user(self, certificate: Mapping[str, Any] | None, headers: Any) -> tuple[str, tuple[str, ...]]:
        """(user, groups) of a request. `certificate` is the verified one of the connection, as ssl gives it.

        Raises Unauthenticated.
        """
        if not certificate:
            raise Unauthenticated("ask through the API server: this connection has no front proxy's certificate")
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
        if self.allowed_names and not set(names) & set(self.allowed_names):
            raise Unauthenticated("the client certificate's name is not one of the front proxy's")
        user = next((headers[name] for name in self.user_headers if headers.get(name)), "")
        if not user:
            raise Unauthenticated("the front proxy named no user")
        groups = [group for name in self.group_headers for group in headers.getall(name, [])]
        return user, tuple(groups)


async def read_front_proxy(cluster: Cluster) -> FrontProxy | None:
    """The front proxy as the API server publishes it; None where aggregation is off."""
    found = await cluster.get(CONFIG_MAP, _NAMESPACE, _NAME)
    data = (found or {}).get("data") or {}
    if not data.get("requestheader-client-ca-file"):
        return None
    names, users, groups = (
        tuple(json.loads(data.get(f"requestheader-{key}") or "[]"))
        for key in ("allowed-names", "username-headers", "group-headers")
    )
    return FrontProxy(data["requestheader-client-ca-file"], names, users, groups)


def server_context(pair: Pair, proxy: FrontProxy | None) -> ssl.SSLContext:
    """TLS with the pair; clients may show a certificate of the front proxy's authority and no other.

    Raises OSError (ssl.SSLError) when the pair is none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, pair)
    if proxy is not None:
        trust(context, proxy)
    return context


def trust(context: ssl.SSLContext, proxy: FrontProxy) -> None:
    """Believe certificates of the front proxy's authority from now on."""
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=proxy.authority)


def load_certificate(context: ssl.SSLContext, pair: Pair) -> None:
    """Serve with the pair from now on. The library reads files alone; this one is on no disk."""
    with os.fdopen(os.memfd_create("tls"), "wb") as stream:
        stream.write(pair.key + b"\n" + pair.certificate)
        stream.flush()
        context.load_cert_chain(f"/proc/self/fd/{stream.fileno()}")


class Verdicts:
    """What users may read, by SubjectAccessReview."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[object, ...], tuple[float, bool]] = {}

    async def may_read(self, user: str, groups: tuple[str, ...], group: str, namespace: str, series: str) -> bool:
        """Whether the API server lets `user` get pods/`series` of API group `group`. Raises ApiError."""
        key = (user, groups, group, namespace, series)
        made, verdict = self._known.get(key, (-VERDICT_SECONDS, False))
        now = time.monotonic()
        if now - made < VERDICT_SECONDS:
            return verdict
        asked = {"namespace": namespace, "verb": "get", "group": group, "resource": "pods", "subresource": series}
        review = {
            "apiVersion": ACCESS_REVIEW.api_version,
            "kind": ACCESS_REVIEW.kind,
            "metadata": {"namespace": ""},
            "spec": {"user": user, "groups": list(groups), "resourceAttributes": asked},
        }
        answer = await self._cluster.create(ACCESS_REVIEW, review)
        if len(self._known) >= _MOST_VERDICTS:
            self._known.clear()
        self._known[key] = (now, bool(answer["status"]["allowed"]))
        return self._known[key][1]
