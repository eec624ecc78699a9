"""The connection to one API server: typed paths, server-side apply, bounded concurrency, retries the server
asks for.

Invariants: one client a process; every request has a deadline; 429 and 5xx are tried again as the server
says, other errors reach the caller as ApiError at once; bodies are never logged.
Knows nothing of what the objects mean.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode
from urllib.request import getproxies_environment

import aiohttp
import orjson
from kubernetes.aio import client as kubernetes
from kubernetes.aio import config as kubernetes_config
from yarl import URL

from stoker_operator import metrics
from stoker_operator.cluster.kinds import EVENT, POD, Kind
from stoker_operator.manifests.cache import services_of
from stoker_operator.manifests.identity import FIELD_MANAGER, OURS

Object = dict[str, Any]
REQUEST_SECONDS = 30.0
WATCH_SECONDS = 240
PAGE_ITEMS = 200
TRIES = 4
LONGEST_WAIT_SECONDS = 10.0
DISCOVERY_SECONDS = 60.0


class ApiError(Exception):
    """The API server's refusal, in its own words. `status` is the HTTP status, 0 when nothing answered."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class _PlainClient(kubernetes.ApiClient):
    """The library's client, of which this takes credentials, TLS, proxies and the connections; bodies are plain data
    already, and names that Kubernetes allows need no quoting: the library would copy and quote each, value by value.
    """

    async def send(
        self, method: str, path: str, query: Sequence[tuple[str, str]], body: Object | None, content_type: str,
        seconds: float,
    ) -> aiohttp.ClientResponse:  # fmt: skip
        """The answer, whose body is to be read yet, within so many seconds in all."""
        settings, connections = self.configuration, self.rest_client
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": self.user_agent}
        await self.update_params_for_auth(headers, [], ["BearerToken"], path, method, None)
        if connections.pool_manager is None:
            connections.pool_manager = connections._create_pool_manager()
        more: dict[str, Any] = {"server_hostname": settings.tls_server_name} if settings.tls_server_name else {}
        more |= {"proxy": connections.proxy} if connections.proxy else {}
        more |= {"proxy_headers": connections.proxy_headers} if connections.proxy_headers else {}
        url = f"{settings.host}{path}?{urlencode(query)}" if query else f"{settings.host}{path}"
        answer: aiohttp.ClientResponse = await connections.pool_manager.request(
            method,
            URL(url, encoded=True),
            data=orjson.dumps(body) if body is not None else None,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=seconds),
            **more,
        )
        return answer


class Cluster:
    """Requests to the API server. Use `connect` to make one and `close` to end it."""

    def __init__(self, client: Any, concurrency: int) -> None:
        self._client = client
        self._slots = asyncio.Semaphore(concurrency)
        self._served: dict[str, tuple[float, frozenset[str]]] = {}
        self._recent: dict[str, tuple[float, list[Object]]] = {}

    def _share(self, other: Cluster) -> None:
        """Use another's connections, slots and knowledge."""
        self._client, self._slots = other._client, other._slots
        self._served, self._recent = other._served, other._recent

    @classmethod
    async def connect(cls, concurrency: int = 32) -> Cluster:
        """Credentials of the pod's service account, else of KUBECONFIG."""
        configuration = kubernetes.Configuration()
        try:
            kubernetes_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except kubernetes_config.ConfigException:
            # The library reads the variable once, when it is imported.
            file = os.environ.get("KUBECONFIG") or None
            await kubernetes_config.load_kube_config(file, client_configuration=configuration)  # type: ignore[no-untyped-call]
        # Requests are bounded by our own slots, and watches must not wait for one another's connections.
        configuration.connection_pool_maxsize = 0
        # To trust the environment means to read ~/.netrc in a thread for every request; only proxies are of use here.
        configuration.client_session_kwargs = {"trust_env": bool(getproxies_environment())}
        return cls(_PlainClient(configuration), concurrency)

    def aside(self, concurrency: int) -> Cluster:
        """The same connections with slots of their own, for what must not wait in line."""
        return Cluster(self._client, concurrency)

    async def close(self) -> None:
        """End the connections."""
        await self._client.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object, or None when there is none."""
        try:
            return await self._request("GET", kind, kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def served(self, wanted: Sequence[Kind]) -> frozenset[str]:
        """Names of the kinds of `wanted` that this API server knows now, looked up at most once a minute."""
        known: set[str] = set()
        for group in sorted({kind.api_version for kind in wanted}):
            known |= {kind.kind for kind in wanted if kind.api_version == group} & await self._kinds_of(group)
        return frozenset(known)

    async def _kinds_of(self, group: str) -> frozenset[str]:
        looked, found = self._served.get(group, (-DISCOVERY_SECONDS, frozenset()))
        now = time.monotonic()
        if now - looked < DISCOVERY_SECONDS:
            return found
        try:
            answer = await self._request("GET", Kind(group, "APIResourceList", ""), f"/apis/{group}")
            found = frozenset(item["kind"] for item in answer["resources"])
        except ApiError as error:
            if error.status != 404:
                raise
            found = frozenset()
        self._served[group] = (now, found)
        return found

    async def list_all(self, kind: Kind, namespace: str, selector: str = "") -> list[Object]:
        """The objects of a namespace ("": of all) that carry the labels of `selector`."""
        return [item async for items, _ in self.pages(kind, namespace, selector) for item in items]

    async def together(self, kinds: Sequence[Kind], namespace: str, selector: str) -> dict[Kind, list[Object]]:
        """`list_all` of several kinds."""
        lists = await asyncio.gather(*(self.list_all(kind, namespace, selector) for kind in kinds))
        return dict(zip(kinds, lists, strict=True))

    async def concerning(self, kind: Kind, namespace: str, service: str) -> list[Object]:
        """Our objects of a kind that concern a service of the namespace, as `services_of` has it."""
        found = await self.list_all(kind, namespace, OURS)
        return [item for item in found if service in services_of(item["metadata"])]

    async def by_name(self, kind: Kind, namespace: str) -> Mapping[str, Object]:
        """Our objects of a kind in a namespace by their names, as they are now."""
        return {item["metadata"]["name"]: item for item in await self.list_all(kind, namespace, OURS)}

    async def recent(self, kind: Kind) -> list[Object]:
        """All objects of a kind as they were within the last minute: for what hardly changes and many ask for."""
        looked, items = self._recent.get(kind.kind, (-DISCOVERY_SECONDS, []))
        if time.monotonic() - looked >= DISCOVERY_SECONDS:
            items = await self.list_all(kind, "")
            self._recent[kind.kind] = (time.monotonic(), items)
        return items

    async def pages(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[tuple[list[Object], str]]:
        """(some of the objects, the resourceVersion from which a watch goes on), all pages of one moment.

        A long list taken apart at once would hold up everything else, the lease included. Raises ApiError.
        """
        query = [("limit", str(PAGE_ITEMS)), *([("labelSelector", selector)] if selector else [])]
        more = ""
        while True:
            asked = [*query, ("continue", more)] if more else query
            answer = await self._request("GET", kind, kind.path(namespace), query=asked)
            # The API server leaves these two out of a list's items.
            items = [item | {"apiVersion": kind.api_version, "kind": kind.kind} for item in answer["items"]]
            yield items, str(answer["metadata"]["resourceVersion"])
            more = str(answer["metadata"].get("continue") or "")
            if not more:
                return

    async def watch(self, kind: Kind, namespace: str, selector: str, since: str) -> AsyncIterator[tuple[str, Object]]:
        """(event, object) from `since` on, until the API server ends the stream after some minutes.

        Raises ApiError; 410 means that `since` is too long ago.
        """
        query = [("watch", "true"), ("allowWatchBookmarks", "true"), ("resourceVersion", since)]
        query += [("timeoutSeconds", str(WATCH_SECONDS)), *([("labelSelector", selector)] if selector else [])]
        # A stream can freeze without an error: none lives longer than the API server was asked to keep it.
        limit = WATCH_SECONDS + REQUEST_SECONDS
        try:
            answer = await self._client.send("GET", kind.path(namespace), query, None, "application/json", limit)
            try:
                metrics.API_REQUESTS.labels(verb="WATCH", kind=kind.kind, code=str(answer.status)).inc()
                if answer.status != 200:
                    raise _error(answer.status, await answer.read())
                async for line in answer.content:
                    event = orjson.loads(line)
                    if event["type"] == "ERROR":
                        raise _error(int(event["object"].get("code", 0)), orjson.dumps(event["object"]))
                    yield event["type"], event["object"]
            finally:
                _cut(answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiError(0, "", f"the stream broke: {type(error).__name__}: {error}") from None

    async def pods_on(self, node: str) -> list[Object]:
        """Every pod of a node, "": those that wait for one, in any namespace."""
        answer = await self._request("GET", POD, POD.path(""), query=[("fieldSelector", f"spec.nodeName={node}")])
        found: list[Object] = answer["items"]
        return found

    async def events_of_pods(self, namespace: str, reason: str) -> list[Object]:
        """The events of this reason on pods of a namespace ("": of all)."""
        chosen = f"involvedObject.kind=Pod,reason={reason}"
        answer = await self._request("GET", EVENT, EVENT.path(namespace), query=[("fieldSelector", chosen)])
        found: list[Object] = answer["items"]
        return found

    async def apply(
        self, kind: Kind, manifest: Mapping[str, Any], subresource: str = "", manager: str = FIELD_MANAGER
    ) -> Object:
        """Server-side apply as our field manager; fields that we set are ours, others' fields stay. What has no
        namespace belongs to the cluster.
        """
        meta = manifest["metadata"]
        path = kind.path(meta.get("namespace", ""), meta["name"], subresource)
        query = [("fieldManager", manager), ("force", "true")]
        return await self._request("PATCH", kind, path, dict(manifest), query, "application/apply-patch+yaml")

    async def create(self, kind: Kind, manifest: Mapping[str, Any]) -> Object:
        """Create; ApiError 409 when the name is taken."""
        path = kind.path(manifest["metadata"]["namespace"])
        return await self._request("POST", kind, path, dict(manifest), [("fieldManager", FIELD_MANAGER)])

    async def replace(self, kind: Kind, manifest: Mapping[str, Any]) -> Object:
        """Replace at the resourceVersion in the manifest; ApiError 409 when somebody was faster."""
        meta = manifest["metadata"]
        path = kind.path(meta["namespace"], meta["name"])
        return await self._request("PUT", kind, path, dict(manifest), [("fieldManager", FIELD_MANAGER)])

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Object:
        """Apply a JSON merge patch; with a resourceVersion in it ApiError 409 when somebody was faster."""
        query = [("fieldManager", FIELD_MANAGER)]
        content = "application/merge-patch+json"
        return await self._request("PATCH", kind, kind.path(namespace, name), dict(patch), query, content)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str, *, foreground: bool = False) -> None:
        """Delete this very object and what it owns, in the background or, `foreground`, before it goes itself; nothing
        happens if it is gone.
        """
        body = {"propagationPolicy": "Foreground" if foreground else "Background", "preconditions": {"uid": uid}}
        try:
            await self._request("DELETE", kind, kind.path(namespace, name), body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def _request(
        self,
        method: str,
        kind: Kind,
        path: str,
        body: Object | None = None,
        query: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        for attempt in range(TRIES):
            started = time.monotonic()
            async with self._slots:
                status, retry_after, text = await self._once(method, path, body, query, content_type)
            metrics.API_REQUESTS.labels(verb=method, kind=kind.kind, code=str(status)).inc()
            metrics.API_SECONDS.labels(verb=method).observe(time.monotonic() - started)
            if 200 <= status < 300:
                answer: Object = orjson.loads(text)
                return answer
            again = status in (0, 429) or status >= 500
            if not again or attempt == TRIES - 1:
                raise _error(status, text)
            await asyncio.sleep(min(retry_after or 0.2 * 2**attempt, LONGEST_WAIT_SECONDS))
        raise AssertionError("the last try returns or raises")

    async def _once(
        self,
        method: str,
        path: str,
        body: Object | None,
        query: list[tuple[str, str]] | None,
        content_type: str,
    ) -> tuple[int, float, bytes]:
        """(status, Retry-After in seconds or 0, body); status 0 when the server did not answer."""
        try:
            answer = await self._client.send(method, path, query or [], body, content_type, REQUEST_SECONDS)
            text = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return 0, 0.0, f"the API server did not answer: {type(error).__name__}: {error}".encode()
        stated = answer.headers.get("Retry-After", "")
        return answer.status, float(stated) if stated.isdigit() else 0.0, text


def _cut(answer: aiohttp.ClientResponse) -> None:
    """End a stream now: an API server that hangs, or has much to do, would keep its end of a TLS connection open."""
    connection = answer.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    answer.close()


def _error(status: int, body: bytes) -> ApiError:
    text = body.decode("utf-8", "replace")
    try:
        answer = orjson.loads(body)
    except ValueError:
        answer = {}
    if not isinstance(answer, dict):
        answer = {}
    return ApiError(status, str(answer.get("reason", "")), str(answer.get("message", text))[:2000])
