"""What a workload is known by in place of keys: EKS' IRSA, GKE's and AKS' workload identity, each by its own exchange
with a server that gives nothing for another token, role or client.
"""

from __future__ import annotations

import os
import secrets
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.stores.identities import Identities
from tests.runtime.fetch.stores.conftest import PREFIX, Fetch, Lent
from tests.serving import serving

from stoker_runtime.fetch.errors import BadRequest, FetchError, HubUnreachable, TokenRejected

ROOT = Path(__file__).parents[4]
TLS = ROOT / "tests" / "api" / "serve" / "tls"
SHARD = "model-00001-of-00002.safetensors"
# The library keeps nothing that ends within four minutes, for longer than a tenth of a second.
SOON, NOT_KEPT = 200, 0.15


@pytest.fixture(params=["s3", "gs", "az"])
def cloud(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return tmp_path / "serviceaccount" / "token"


@pytest.fixture
def identities(
    cloud: str, store: Lent, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Identities]:
    """The cloud's service, and an environment as its webhook makes it, without keys. AWS' is asked by TLS alone."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    server = Identities(store.server.access, tls if cloud == "s3" else None)
    known = server.workload
    token_file.parent.mkdir()
    token_file.write_text(known.token)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GOOGLE_BEARER_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name)
    injected = {
        "s3": {
            "AWS_ROLE_ARN": known.role,
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(token_file),
            "AWS_REGION": "eu-central-1",
            "AWS_DEFAULT_REGION": "eu-central-1",
            "AWS_STS_REGIONAL_ENDPOINTS": "regional",
        },
        "gs": {},
        "az": {
            "AZURE_CLIENT_ID": known.client,
            "AZURE_TENANT_ID": known.tenant,
            "AZURE_FEDERATED_TOKEN_FILE": str(token_file),
            "AZURE_AUTHORITY_HOST": f"{server.url}/",
        },
    }
    # Where the service is found, which is the cloud's own place elsewhere.
    here = {
        "s3": {"AWS_ENDPOINT_URL_STS": server.url, "SSL_CERT_FILE": str(TLS / "ca.pem")},
        "gs": {"GCE_METADATA_HOST": server.address, "GCE_METADATA_IP": server.address},
        "az": {},
    }
    for name, value in (injected[cloud] | here[cloud]).items():
        monkeypatch.setenv(name, value)
    with serving(server):
        yield server


@pytest.fixture
def uri(cloud: str, store: Lent) -> str:
    return f"{cloud}://{store.bucket}/{PREFIX}"


def secret_things(identities: Identities, *more: str) -> list[str]:
    """What nobody may read: the workload's token, and all that was given for it."""
    return [identities.workload.token, *more, *(secret for given in identities.given for secret in given)]


def test_an_identity_is_exchanged_once_and_lets_one_in(
    fetch: Fetch, store: Lent, identities: Identities, uri: str, said: list[str]
) -> None:
    published = fetch(uri=uri)
    assert (published.folder / SHARD).read_bytes() == store.content(SHARD)
    assert len(identities.given) == 1, "what holds for an hour is asked for once"
    assert not identities.refused
    assert not [secret for secret in secret_things(identities) if secret in "".join(said)]


def test_what_ends_soon_is_renewed_by_the_token_that_the_file_holds_then(
    fetch: Fetch, store: Lent, identities: Identities, token_file: Path, uri: str
) -> None:
    identities.lifetime = SOON

    def run_out() -> None:
        """Nothing that was given opens the store any more, and the kubelet has written another token."""
        identities.withdraw()
        identities.workload.token = f"web.{secrets.token_urlsafe(24)}"
        token_file.write_text(identities.workload.token)
        time.sleep(NOT_KEPT)

    store.server.faults.listing = run_out
    published = fetch(uri=uri)
    assert (published.folder / SHARD).read_bytes() == store.content(SHARD)
    assert len(identities.given) > 3, "each page was listed by another, and the objects by one more"
    assert not identities.refused


def test_what_is_withdrawn_before_its_end_is_said(
    fetch: Fetch, store: Lent, identities: Identities, uri: str
) -> None:
    store.server.faults.listing = identities.withdraw
    with pytest.raises(TokenRejected, match=r"refused access \((400|401|403) ") as failure:
        fetch(uri=uri)
    assert not [secret for secret in secret_things(identities) if secret in failure.value.message]


OTHER = {
    "s3": "answered with status 400 InvalidIdentityToken.*s3:GetObject",
    "gs": r"answered with status 403\).*storage.objects.get",
    "az": "answered with status 401 AADSTS700211.*Storage Blob Data Reader",
}


def test_another_workload_gets_nothing_and_reads_why(
    fetch: Fetch, identities: Identities, token_file: Path, cloud: str, uri: str
) -> None:
    other = f"web.{secrets.token_urlsafe(24)}"
    token_file.write_text(other)
    identities.workload.bound = False
    with pytest.raises(TokenRejected, match=OTHER[cloud]) as failure:
        fetch(uri=uri)
    assert identities.refused
    assert not identities.given
    assert not [secret for secret in secret_things(identities, other) if secret in failure.value.message]


@pytest.mark.parametrize(
    ("cloud", "name", "value", "says"),
    [
        ("s3", "AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/other", "status 403 AccessDenied"),
        ("az", "AZURE_CLIENT_ID", "another", "status 400 AADSTS700016"),
        ("az", "AZURE_TENANT_ID", "another", "status 404"),
        ("s3", "AWS_WEB_IDENTITY_TOKEN_FILE", "/nowhere/token", "workload's token cannot be read"),
        ("az", "AZURE_FEDERATED_TOKEN_FILE", "/nowhere/token", "workload's token cannot be read"),
    ],
    indirect=["cloud"],
)
def test_another_role_client_or_file_is_refused(
    fetch: Fetch, identities: Identities, monkeypatch: pytest.MonkeyPatch, uri: str, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(TokenRejected, match=says):
        fetch(uri=uri)
    assert not identities.given


@pytest.mark.parametrize(
    ("cloud", "name", "value", "kind", "says"),
    [
        ("s3", "AWS_ENDPOINT_URL_STS", "https://127.0.0.1:1", HubUnreachable, "identity's service cannot be reached"),
        ("s3", "SSL_CERT_FILE", str(TLS / "client.pem"), HubUnreachable, "identity's service cannot be reached"),
        ("s3", "AWS_ENDPOINT_URL_STS", "http://127.0.0.1:1", BadRequest, "no https:// address"),
        ("az", "AZURE_AUTHORITY_HOST", "http://127.0.0.1:1/", HubUnreachable, "identity's service cannot be reached"),
        ("gs", "GCE_METADATA_HOST", "127.0.0.1:1", TokenRejected, "no credentials were found"),
    ],
    indirect=["cloud"],
)
def test_a_service_that_cannot_be_asked_is_no_refusal(
    fetch: Fetch,
    identities: Identities,
    monkeypatch: pytest.MonkeyPatch,
    uri: str,
    name: str,
    value: str,
    kind: type[FetchError],
    says: str,
) -> None:
    """But of a machine's own address, which nobody answers anywhere else."""
    for variable in (name, "GCE_METADATA_IP"):
        monkeypatch.setenv(variable, value)
    with pytest.raises(kind, match=says):
        fetch(uri=uri)
    assert not identities.given


def test_a_service_that_is_busy_is_asked_again(
    fetch: Fetch, identities: Identities, uri: str, said: list[str]
) -> None:
    identities.status = 503
    with pytest.raises(HubUnreachable, match=r"cannot be had now .*status 503"):
        fetch(uri=uri)
    assert any("503" in text for text in said)


def test_a_process_prints_and_leaves_no_secret(
    store: Lent, identities: Identities, token_file: Path, tmp_path: Path, uri: str
) -> None:
    """`stoker fetch`, with the environment that a pod has."""
    log = tmp_path / "termination-log"
    paths = os.pathsep.join(str(ROOT / name) for name in ("cli", "runtime"))
    command = [sys.executable, "-m", "stoker_cli", "fetch", "--uri", uri, "--dest", str(tmp_path / "models")]
    endpoint = f"{store.server.url}/{store.server.access.account[0]}" if uri.startswith("az:") else store.server.url
    command += ["--endpoint", endpoint, "--termination-log", str(log)]

    def run() -> tuple[int, str]:
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        return done.returncode, done.stdout + done.stderr + log.read_text()

    other = f"web.{secrets.token_urlsafe(24)}"
    token_file.write_text(other)
    identities.workload.bound = False
    status, refused = run()
    assert (status, "TokenRejected" in refused) == (3, True), refused
    token_file.write_text(identities.workload.token)
    identities.workload.bound = True
    status, told = run()
    assert (status, bool(identities.given)) == (0, True), told
    kept = [path.read_bytes() for path in (tmp_path / "models").rglob("*") if path.is_file()]
    for secret in secret_things(identities, other):
        assert secret not in refused + told
        assert not [content for content in kept if secret.encode() in content]
