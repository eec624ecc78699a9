"""Who is let in, and what is said to those who are not: the bucket, the reason, the fix, and never a secret."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from tests.runtime.fetch.stores.conftest import Fetch, Lent

from stoker_runtime.fetch.errors import BadRequest, FetchError, HubUnreachable, ModelNotFound, TokenRejected

Variables = dict[str, str]


@pytest.mark.parametrize(
    ("uri", "variables", "kind", "says"),
    [
        ("s3://{bucket}/p", {"AWS_SECRET_ACCESS_KEY": "wrong-secret"}, TokenRejected, "SignatureDoesNotMatch"),
        ("s3://{bucket}/p", {"AWS_ACCESS_KEY_ID": "AKother"}, TokenRejected, "The access key is not known there"),
        ("s3://{bucket}/p", {"AWS_SKIP_SIGNATURE": "true"}, TokenRejected, "s3:ListBucket"),
        ("s3://{bucket}/p", {"AWS_ACCESS_KEY_ID": ""}, BadRequest, "Missing AccessKeyId; check the credentials"),
        ("s3://{bucket}/p", {}, ModelNotFound, "s3://{bucket}/p: nothing lies there"),
        ("s3://{bucket}x/p", {}, ModelNotFound, "there is no bucket '{bucket}x' at http://127.0.0.1"),
        ("s3://{bucket}/p/m.gguf", {}, ModelNotFound, "nothing lies there"),
        ("gs://{bucket}/p", {"GOOGLE_BEARER_TOKEN": "wrong-token"}, TokenRejected, "storage.objects.list"),
        ("az://{bucket}/p", {"AZURE_STORAGE_ACCOUNT_KEY": "d3Jvbmcta2V5"}, TokenRejected, "SAS token, is wrong"),
        ("az://{bucket}/p", {"AZURE_STORAGE_ACCOUNT_KEY": "wrong key!"}, BadRequest, "check the credentials"),
        ("az://{bucket}x/p", {}, ModelNotFound, "there is no container '{bucket}x'"),
        ("az://{bucket}/p", {"AZURE_STORAGE_ACCOUNT_NAME": ""}, BadRequest, "set AZURE_STORAGE_ACCOUNT_NAME"),
        ("s3://{bucket}/p", {"AWS_ENDPOINT_URL": "http://key:wrong-secret@127.0.0.1"}, BadRequest, "without user name"),
        (
            "s3://{bucket}/p",
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"},
            HubUnreachable,
            "127.0.0.1:1 cannot be reached",
        ),
    ],
)
def test_a_refusal_names_the_bucket_the_reason_and_the_fix(
    fetch: Fetch,
    store: Lent,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    uri: str,
    variables: Variables,
    kind: type[FetchError],
    says: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(kind, match=says.format(bucket=store.bucket)) as failure:
        fetch(uri=uri.format(bucket=store.bucket))
    told = failure.value.message + "".join(said)
    for secret in (store.secret, store.access_key, *store.server.access.account[1:], store.server.access.token):
        assert secret not in told
    assert not any(value in told for value in variables.values() if value.startswith("wrong"))


def test_another_region_is_named(fetch: Fetch, store: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    store.server.access.region = f"eu-{secrets.token_hex(2)}-3"
    with pytest.raises(BadRequest, match=f"another region than us-east-1.*set AWS_REGION={store.server.access.region}"):
        fetch()
    monkeypatch.setenv("AWS_REGION", store.server.access.region)
    assert fetch().moved


def test_an_endpoint_of_amazon_tells_the_region_and_one_of_azure_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker_runtime.fetch.reference import parse
    from stoker_runtime.fetch.stores.client import bucket_of

    bucket = bucket_of(parse("s3://b-1/p"), "https://s3.ap-south-9.amazonaws.com", {})
    assert (bucket.region, bucket.client.config["region"]) == ("ap-south-9", "ap-south-9")
    bucket = bucket_of(parse("az://c-1/p"), "https://some7account.blob.core.windows.net", {})
    assert (bucket.account, bucket.client.config["account_name"]) == ("some7account", "some7account")


def test_a_public_bucket_takes_no_credentials(fetch: Fetch, store: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    store.server.access.public = {store.bucket}
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert fetch().moved


def test_the_role_of_an_instance_is_enough(fetch: Fetch, store: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(TokenRejected, match=r"no credentials were found.*AWS_SECRET_ACCESS_KEY"):
        fetch()
    store.server.access.role = "reader"
    assert fetch().moved


def test_the_identity_of_a_workload_is_enough(
    fetch: Fetch, store: Lent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store.server.access.pod_token = secrets.token_urlsafe(12)
    (tmp_path / "token").write_text("of another workload")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{store.server.url}/v1/credentials")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(TokenRejected, match="no credentials were found"):
        fetch()
    (tmp_path / "token").write_text(store.server.access.pod_token)
    assert fetch().moved
