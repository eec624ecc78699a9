"""What `schemathesis` makes of the OpenAPI document: no 5xx, no hang, and nothing held afterwards."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from known_names import KEY, client

schemathesis = client("schemathesis")

pytestmark = [
    pytest.mark.filterwarnings("ignore:::(schemathesis|jsonschema|jsonschema_rs|hypothesis_jsonschema)"),
    # schemathesis makes a session for each case and closes none.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
BEARER = {"authorization": f"Bearer {KEY}"}
LIMITS = settings(max_examples=6, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
HANG_SECONDS = 20.0
MOST = {"POSITIVE": 14, "NEGATIVE": 5}
"""Operations that there are cases for, at least."""


@pytest.fixture(scope="module")
def http(tiny_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_url, headers=BEARER, timeout=HANG_SECONDS, verify=False) as found:
        yield found


def try_cases(cases: Any, seen: set[int]) -> None:
    """Send cases of one operation, and note the statuses."""

    @LIMITS
    @given(case=cases)
    def check(case: Any) -> None:
        seen.add(case.call(headers=BEARER, timeout=HANG_SECONDS).status_code)

    check()


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_every_operation(http: httpx.Client, mode: str) -> None:
    """POSITIVE: bodies that the document allows; NEGATIVE: bodies that it does not."""
    generation = getattr(schemathesis.GenerationMode, mode)
    schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
    schema.config.update(base_url=str(http.base_url))
    statuses: dict[str, set[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        seen = statuses.setdefault(operation.label, set())

        with contextlib.suppress(Unsatisfiable):
            try_cases(operation.as_strategy(generation_mode=generation), seen)
    tried = {label: codes for label, codes in statuses.items() if codes}
    assert len(tried) >= MOST[mode]
    wrong = {label: codes for label, codes in tried.items() if any(code >= 500 and code != 501 for code in codes)}
    assert not wrong
    assert_idle(http)


def assert_idle(http: httpx.Client) -> None:
    """The engine holds nothing any more."""
    deadline = time.monotonic() + 10
    while True:
        lines = http.get("/metrics").text.splitlines()
        held = [line for line in lines if line.startswith(("vllm:num_requests_", "vllm:kv_cache_usage_perc"))]
        if all(line.endswith(" 0.0") for line in held):
            break
        assert time.monotonic() < deadline, held
        time.sleep(0.1)
    assert http.get("/health").status_code == 200
