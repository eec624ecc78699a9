"""Scenario 17: what stands between clients and the engine: TLS to the pods and certificates of clients, keys, rate
limits of each key, bounds of bodies; by the `openai` client, with keys and certificates renewed under it.
"""

from __future__ import annotations

import base64
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from cryptography import x509
from e2e.cluster.backend import Given
from e2e.cluster.binaries import Say
from e2e.scenarios import stoker
from e2e.scenarios.edge.authority import Authority, Issued
from e2e.scenarios.kube import Kube, eventually

LARGEST = 4096
PER_MINUTE = 4
TOKENS = 60
# Kubelets bring a Secret to their pods within a minute and what their cache adds.
KUBELET_SECONDS = 240
KEYS = ["sk-search-1 name=search", "sk-nightly-1 name=nightly", "sk-texts-1 name=texts rpm=0"]


def secret(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}


def pair(issued: Issued) -> dict[str, Any]:
    data = {"tls.crt": issued.certificate, "tls.key": issued.key}
    return secret("model-tls", **data) | {"type": "kubernetes.io/tls"}


def complete(client: openai.OpenAI, prompt: str = "Hello") -> str:
    answer = client.completions.create(model="model", prompt=prompt, max_tokens=2, temperature=0)
    return str(answer.choices[0].finish_reason)


def streamed(client: openai.OpenAI) -> int:
    """Pieces of a streamed answer."""
    with client.completions.create(model="model", prompt="Count to five:", max_tokens=12, stream=True) as stream:
        return sum(1 for _ in stream)


def unchanged(place: Kube) -> tuple[str, list[int]]:
    """What another pod, or a restart, would change."""
    (pod,) = stoker.engine_pods(place, "model")
    return pod["metadata"]["uid"], [each["restartCount"] for each in pod["status"]["containerStatuses"]]


class Caller:
    """Who trusts `authority` and, with `own`, shows a certificate; it knows the service by `name`, at any address."""

    def __init__(self, folder: Path, name: str, authority: str, own: Issued | None = None) -> None:
        self._context = ssl.create_default_context(cadata=authority)
        self._name = name
        if own is not None:
            files = folder / f"{own.serial}.crt", folder / f"{own.serial}.key"
            for file, text in zip(files, (own.certificate, own.key), strict=True):
                file.write_text(text)
            self._context.load_cert_chain(*files)

    @contextmanager
    def calling(self, base: str, key: str) -> Iterator[openai.OpenAI]:
        """The `openai` client; the name it asks for, and verifies, is the service's."""

        def name_it(request: Any) -> None:
            request.extensions["sni_hostname"] = self._name

        hooks = {"request": [name_it]}
        with openai.DefaultHttpxClient(verify=self._context, event_hooks=hooks, trust_env=False) as client:
            yield openai.OpenAI(base_url=f"{base}/v1", api_key=key, timeout=120, max_retries=0, http_client=client)

    def serial(self, base: str) -> int:
        """The serial number of the certificate that the server shows now."""
        return x509.load_der_x509_certificate(self._shown(base)).serial_number

    def _shown(self, base: str) -> bytes:
        address = urlsplit(base)
        with httpx.Client(verify=self._context, trust_env=False) as client:
            head = {"Host": self._name}
            request = client.build_request("GET", f"{base}/health", headers=head)
            request.extensions["sni_hostname"] = self._name
            answer = client.send(request)
            assert answer.status_code == 200, (address, answer.text)
            stream = answer.extensions["network_stream"]
            return bytes(stream.get_extra_info("ssl_object").getpeercert(True))


def test_tls_to_the_pods_and_certificates_of_clients(place: Kube, given: Given, tmp_path: Path, say: Say) -> None:
    if given.node is None:
        pytest.skip("the API server's proxy shows pods no certificate: needs a node of this machine")
    name = f"model.{place.namespace}.svc"
    inside, callers, strange = Authority("inside"), Authority("callers"), Authority("strange")
    first = inside.issue(name)
    place.apply(pair(first), secret("callers", **{"ca.crt": callers.certificate}), secret("keys", keys="\n".join(KEYS)))
    ends = {"podTLS": {"secretName": "model-tls", "clientCASecretName": "callers"},
            "auth": {"apiKeysSecretRef": {"name": "keys"}}}  # fmt: skip
    place.apply(stoker.service("model", endpoint=ends))
    stoker.wait_ready(place, "model")
    assert place.get("infsvc", "model")["status"]["url"].startswith("https://")
    base = stoker.url(place, "model").replace("http://", "https://")
    known = Caller(tmp_path, name, inside.certificate, callers.issue("app"))
    with known.calling(base, "sk-search-1") as client:
        assert complete(client) == "length"
        assert streamed(client) > 2
    with ExitStack() as stack:
        bare = stack.enter_context(Caller(tmp_path, name, inside.certificate).calling(base, "sk-search-1"))
        with pytest.raises(openai.PermissionDeniedError) as refused:
            complete(bare)
        assert refused.value.code == "certificate_required"
        for caller in (
            Caller(tmp_path, name, inside.certificate, strange.issue("app")),
            Caller(tmp_path, name, strange.certificate, callers.issue("app")),
            Caller(tmp_path, f"other.{place.namespace}.svc", inside.certificate, callers.issue("app")),
        ):
            client = stack.enter_context(caller.calling(base, "sk-search-1"))
            with pytest.raises(openai.APIConnectionError):
                complete(client)
        wrong = stack.enter_context(known.calling(base, "sk-none"))
        with pytest.raises(openai.AuthenticationError):
            complete(wrong)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{base.replace('https://', 'http://')}/health", timeout=30, trust_env=False)

    before, second, next_callers = unchanged(place), inside.issue(name), Authority("next callers")
    assert known.serial(base) == first.serial
    place.apply(pair(second), secret("callers", **{"ca.crt": next_callers.certificate}))
    watch = stoker.Stopwatch()
    eventually("the renewed certificate is shown", lambda: known_serial(tmp_path, name, inside, base) == second.serial,
               KUBELET_SECONDS)  # fmt: skip
    eventually("the authority that was taken out lets nobody in", lambda: shut_out(known, base), KUBELET_SECONDS)
    say(f"edge: a renewed certificate and another authority held after {watch.seconds:.0f} s, without a restart")
    with Caller(tmp_path, name, inside.certificate, next_callers.issue("app")).calling(base, "sk-search-1") as client:
        assert complete(client) == "length"
    assert unchanged(place) == before
    assert stoker.conditions(place, "model")["Ready"]["status"] == "True"


def known_serial(folder: Path, name: str, authority: Authority, base: str) -> int:
    """What a client without a certificate, as a probe is, sees."""
    return Caller(folder, name, authority.certificate).serial(base)


def shut_out(caller: Caller, base: str) -> bool:
    with caller.calling(base, "sk-search-1") as client:
        try:
            complete(client)
        except openai.APIConnectionError:
            return True
    return False


def test_keys_limits_and_bounds(place: Kube, say: Say) -> None:
    place.apply(secret("keys", keys="\n".join(KEYS)))
    limits = {"requestsPerMinute": PER_MINUTE, "tokensPerMinute": TOKENS}
    ends = {"auth": {"apiKeysSecretRef": {"name": "keys"}}, "rateLimit": limits}
    place.apply(stoker.service("model", endpoint=ends, runtime={"args": [f"--max-body-bytes={LARGEST}"]}))
    stoker.wait_ready(place, "model")
    base, before = stoker.url(place, "model"), unchanged(place)

    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{base}/v1", api_key=key, timeout=120, max_retries=0)

    search, nightly = client("sk-search-1"), client("sk-nightly-1")
    with pytest.raises(openai.APIStatusError) as large:
        complete(search, "word " * LARGEST)
    assert large.value.status_code == 413
    seconds = use_up(search)
    assert complete(nightly) == "length", "another key has its own minute"
    watch = stoker.Stopwatch()
    time.sleep(seconds)
    assert complete(search) == "length", "who waited as long as was said is let in"
    owe_tokens(client("sk-texts-1"))
    assert complete(nightly) == "length", "another key owes nothing"
    say(f"edge: a key was told to wait {seconds} s and was let in after {watch.seconds:.0f} s")

    place.apply(secret("keys", keys="\n".join(["sk-search-2 name=search", *KEYS[1:]])))
    watch = stoker.Stopwatch()
    eventually("the new key holds", lambda: lists(client("sk-search-2")), KUBELET_SECONDS)
    eventually("the old one does not", lambda: not lists(search), KUBELET_SECONDS)
    say(f"edge: keys were rotated after {watch.seconds:.0f} s, without a restart")
    assert lists(nightly)
    assert unchanged(place) == before
    held = base64.b64decode(place.get("secret", "keys")["data"]["keys"]).decode()
    assert "sk-search-2" in held
    assert "sk-search" not in place.kubectl("get", "infsvc", "model", "-o", "yaml")


def use_up(client: openai.OpenAI) -> int:
    """Ask until the limit refuses; the seconds to wait that it names."""
    answered, refused = 0, None
    while refused is None and answered < 10 * PER_MINUTE:
        try:
            complete(client)
            answered += 1
        except openai.RateLimitError as error:
            refused = error
    assert refused is not None, "no request was refused"
    assert answered >= PER_MINUTE, f"refused after {answered} requests, of {PER_MINUTE} a minute"
    assert refused.response.headers["x-ratelimit-limit-requests"] == str(PER_MINUTE)
    seconds = int(refused.response.headers["retry-after"])
    assert 1 <= seconds <= 60 / PER_MINUTE + 1
    return seconds


def owe_tokens(client: openai.OpenAI) -> None:
    """An answer longer than what is left is given whole, and paid back before the next one."""
    with pytest.raises(openai.BadRequestError) as never:
        complete(client, "word " * 2 * TOKENS)
    assert never.value.code == "prompt_exceeds_rate_limit"
    long = client.completions.create(model="model", prompt="Count:", max_tokens=2 * TOKENS, temperature=0,
                                     extra_body={"ignore_eos": True})  # fmt: skip
    assert long.usage is not None
    assert long.usage.completion_tokens == 2 * TOKENS
    with pytest.raises(openai.RateLimitError) as refused:
        complete(client)
    headers = refused.value.response.headers
    assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == (str(TOKENS), "0")
    # A minute's is owed, a token a second; a part of it is paid back by now.
    assert 20 <= int(headers["retry-after"]) <= 70


def lists(client: openai.OpenAI) -> bool:
    """Whether its key holds; asking for the models costs nothing of the limit."""
    try:
        client.models.list()
    except openai.AuthenticationError:
        return False
    return True
