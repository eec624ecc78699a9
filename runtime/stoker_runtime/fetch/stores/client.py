"""The library's client of one bucket, and where its settings come from.

Credentials come from the environment under the names that AWS, Google and Azure gave them, or, where there are none,
from the machine's own identity (an instance's role, workload identity); the library reads both. What is set here: the
endpoint, time-outs, and plain http for those who name an http:// endpoint.

Invariants: no secret passes through our hands; none is in `Bucket`.
Knows nothing of what lies in a bucket.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from stoker_runtime.fetch.errors import BadRequest
from stoker_runtime.fetch.reference import Reference
from stoker_runtime.fetch.web import CONNECT_SECONDS, STALL_SECONDS, product

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

# A part of a file is given up after this long; the downloader bounds the whole.
_REQUEST_SECONDS = 600.0
# The library's own, of one request, before the downloader counts a failure.
_RETRIES = 3
_RETRY_SECONDS = 60.0
_AUTHORITIES = ("AZURE_STORAGE_AUTHORITY_HOST", "AZURE_AUTHORITY_HOST")
_ACCOUNTS = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT", "AZURE_ACCOUNT_NAME")


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket (Azure: container) of one store, as messages name it. `endpoint` "" is the cloud's own."""

    scheme: str
    name: str
    endpoint: str
    region: str
    account: str
    client: Any = field(repr=False)

    @property
    def kind(self) -> str:
        """What the store calls it."""
        return "container" if self.scheme == "az" else "bucket"

    @property
    def where(self) -> str:
        """The server, for messages."""
        if self.endpoint:
            return self.endpoint
        return {"s3": f"Amazon S3 ({self.region})", "gs": "Google Cloud Storage", "az": f"Azure ({self.account})"}[
            self.scheme
        ]


def bucket_of(reference: Reference, endpoint: str, environ: Mapping[str, str] = os.environ) -> Bucket:
    """The bucket that a reference names; nothing is asked yet. Raises BadRequest for settings that make no sense."""
    scheme, name = reference.scheme, reference.place.partition("/")[0]
    endpoint = endpoint.rstrip("/")
    if endpoint and not re.fullmatch(r"https?://[^/@\s?#]+(/[^\s?#@]*)?", endpoint):
        raise BadRequest("The store's endpoint must be an http:// or https:// address without user name and query.")
    region = _first(environ, "AWS_REGION", "AWS_DEFAULT_REGION")
    region = region or _told(r"//s3[.-]([a-z0-9-]+)\.amazonaws\.", endpoint) or "us-east-1"
    account = _first(environ, *_ACCOUNTS) or _told(r"//([a-z0-9]{3,24})\.(?:blob|dfs)\.", endpoint)
    if scheme == "az" and not account:
        raise BadRequest(
            f"{reference.text}: no storage account is named; set AZURE_STORAGE_ACCOUNT_NAME, or give "
            "https://ACCOUNT.blob.core.windows.net as the endpoint."
        )
    # AKS writes it with a slash at its end, after which the library writes another.
    authority = _first(environ, *_AUTHORITIES).rstrip("/")
    try:
        client = _client(scheme, name, endpoint, region, account, authority)
    except (BaseError, ValueError) as error:
        raise BadRequest(f"{reference.text}: {_settings_problem(error)}") from None
    return Bucket(scheme, name, endpoint, region, account, client)


def _client(scheme: str, name: str, endpoint: str, region: str, account: str, authority: str) -> Any:
    options: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=STALL_SECONDS),
        "timeout": timedelta(seconds=_REQUEST_SECONDS),
        "user_agent": "/".join(product()),
    }
    retry: RetryConfig = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)}
    at: dict[str, Any] = {"client_options": options, "retry_config": retry}
    if scheme == "s3":
        # The name of the general endpoint and of S3's own: whichever is set in the environment gives way to ours.
        at |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint} if endpoint else {}
        return S3Store(name, region=region, **at)
    if scheme == "gs":
        at |= {"base_url": endpoint} if endpoint else {}
        return GCSStore(name, **at)
    at |= {"endpoint": endpoint} if endpoint else {}
    at |= {"authority_host": authority} if authority else {}
    return AzureStore(name, account_name=account, **at)


def _settings_problem(error: Exception) -> str:
    """What the library says of its settings, in its first line; it names keys and files, never their content."""
    text = re.sub(r"^Generic \w+ error: ", "", str(error).partition("\n")[0]).rstrip(".")
    return f"{text}; check the credentials in the environment."


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name].strip() for name in names if environ.get(name, "").strip()), "")


def _told(pattern: str, endpoint: str) -> str:
    match = re.search(pattern, endpoint)
    return match[1] if match else ""
