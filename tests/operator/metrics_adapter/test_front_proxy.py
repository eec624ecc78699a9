"""front_proxy.py: whose word is believed."""

from __future__ import annotations

from typing import Any

import pytest
from multidict import CIMultiDict

from stoker_operator.cluster.api import ApiError
from stoker_operator.metrics_adapter.front_proxy import FrontProxy, Unauthenticated, Verdicts

PROXY = FrontProxy("pem", ("front-proxy-client",), ("X-Remote-User",), ("X-Remote-Group",))
CERTIFICATE = {"subject": ((("commonName", "front-proxy-client"),),)}
HEADERS = CIMultiDict([("X-Remote-User", "hpa"), ("X-Remote-Group", "a"), ("X-Remote-Group", "b")])


def test_the_front_proxy_vouches() -> None:
    assert PROXY.user(CERTIFICATE, HEADERS) == ("hpa", ("a", "b"))


@pytest.mark.parametrize(
    ("certificate", "headers", "says"),
    [
        (None, HEADERS, "ask through the API server"),
        ({}, HEADERS, "ask through the API server"),
        ({"subject": ((("commonName", "someone"),),)}, HEADERS, "not one of the front proxy's"),
        (CERTIFICATE, CIMultiDict(), "named no user"),
    ],
)
def test_nobody_else_does(certificate: Any, headers: Any, says: str) -> None:
    with pytest.raises(Unauthenticated, match=says):
        PROXY.user(certificate, headers)


class Reviews:
    """A cluster that answers reviews, and counts them."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.asked: list[dict[str, Any]] = []

    async def create(self, kind: Any, manifest: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(manifest["spec"])
        return {"status": {"allowed": self.allowed}}


@pytest.mark.parametrize("allowed", [True, False])
async def test_a_verdict_is_asked_for_once(allowed: bool) -> None:
    cluster = Reviews(allowed)
    verdicts = Verdicts(cluster)  # type: ignore[arg-type]
    for _ in range(2):
        assert await verdicts.may_read("u", ("g",), "custom.metrics.k8s.io", "ns", "s") is allowed
    await verdicts.may_read("u", ("g",), "custom.metrics.k8s.io", "other", "s")
    assert [spec["resourceAttributes"]["namespace"] for spec in cluster.asked] == ["ns", "other"]


async def test_a_silent_api_server_is_no_verdict() -> None:
    class Silent:
        async def create(self, kind: Any, manifest: Any) -> Any:
            raise ApiError(0, "", "no answer")

    with pytest.raises(ApiError):
        await Verdicts(Silent()).may_read("u", (), "g", "ns", "s")  # type: ignore[arg-type]
