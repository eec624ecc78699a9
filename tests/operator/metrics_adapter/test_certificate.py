"""certificate.py: a certificate that Go, Python and a renewal accept."""

from __future__ import annotations

import contextlib
import ssl
from datetime import UTC, datetime, timedelta

import pytest

from stoker_operator.metrics_adapter.certificate import Pair, from_files, is_due, issue
from stoker_operator.metrics_adapter.front_proxy import load_certificate, server_context

HOST = "a-release-with-a-name-of-fifty-letters-about-metrics-api.a-namespace-of-some-length.svc"


def verified(serving: ssl.SSLContext, bundle: bytes, host: str = HOST) -> bytes:
    """The certificate that a client who trusts `bundle` alone accepts. Raises ssl.SSLError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serving.wrap_bio(there, back, server_side=True)
    client = ssl.create_default_context(cadata=bundle.decode()).wrap_bio(back, there, server_hostname=host)
    for _ in range(4):  # flights
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return client.getpeercert(binary_form=True) or b""


def test_a_renewal_is_trusted_by_who_knows_it_and_cuts_nobody_off() -> None:
    now = datetime.now(UTC)
    first = issue(HOST, now)
    serving = server_context(first, None)
    before = verified(serving, first.bundle)
    second = issue(HOST, now, first)
    assert verified(serving, second.bundle) == before, "who was told already must trust who serves still"
    load_certificate(serving, second)
    assert verified(serving, second.bundle) not in (b"", before)
    with pytest.raises(ssl.SSLError):
        verified(serving, first.bundle)
    with pytest.raises(ssl.SSLError):
        verified(serving, second.bundle, "elsewhere.svc")


def test_what_is_no_longer_valid_is_no_longer_trusted() -> None:
    now = datetime.now(UTC)
    old = issue(HOST, now - timedelta(days=400))
    assert issue(HOST, now, old).bundle.count(b"BEGIN CERTIFICATE") == 1
    assert issue(HOST, now, issue(HOST, now)).bundle.count(b"BEGIN CERTIFICATE") == 2
    # The one before the one before is not carried along for ever.
    third = issue(HOST, now, issue(HOST, now, issue(HOST, now)))
    assert third.bundle.count(b"BEGIN CERTIFICATE") == 2


@pytest.mark.parametrize(("days", "due"), [(0, False), (240, False), (246, True), (365, True), (900, True)])
def test_a_third_of_its_life_before_the_end_it_is_due(days: int, due: bool) -> None:
    now = datetime.now(UTC)
    assert is_due(issue(HOST, now), HOST, now + timedelta(days=days)) is due


def test_one_for_another_host_or_none_at_all_is_due() -> None:
    now = datetime.now(UTC)
    assert is_due(issue("other.svc", now), HOST, now)
    assert is_due(Pair(b"not a certificate", b"", b""), HOST, now)


def test_the_files_of_a_secret() -> None:
    made = issue(HOST, datetime.now(UTC))
    files = {"tls.crt": made.certificate, "tls.key": made.key}
    assert from_files(files) == made, "without ca.crt the certificate vouches for itself"
    assert from_files(files | {"ca.crt": b"authority"}) == Pair(made.certificate, made.key, b"authority")
    assert from_files({"tls.crt": made.certificate}) is None
    assert from_files({}) is None
