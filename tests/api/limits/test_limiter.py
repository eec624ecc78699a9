"""Rate limits by a clock that the test moves: what is let in, what the answers tell, what comes back."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_runtime.api.limits.ledger import Ledger
from stoker_runtime.api.limits.limiter import HEADERS, RateLimiter
from stoker_runtime.api.limits.rule import Rates
from stoker_runtime.errors import CapacityError, RequestError


class Time:
    """A clock that a test moves, from any hour on."""

    def __init__(self, now: float = 98_765.4) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def limiter(rates: Rates, clock: Time, refused: list[str] | None = None) -> RateLimiter:
    told = refused if refused is not None else []
    return RateLimiter(lambda _: rates, Ledger(), told.append, clock)


def wait_of(each: RateLimiter, owner: str, tokens: int) -> float:
    """0 when it was let in."""
    try:
        each.admit(owner, tokens, {})
    except CapacityError as error:
        return error.retry_after
    return 0.0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 90), st.integers(1, 4000), st.lists(st.tuples(st.floats(0, 25), st.integers(0, 4000)), max_size=80)
)
def test_no_minute_holds_more_than_a_burst_and_a_refill(
    requests: int, tokens: int, asked: list[tuple[float, int]]
) -> None:
    """Against a plain count of what was let in within any 60 seconds: a bucket lets in its content and what flows in
    meanwhile; and who waits as long as it was told to is let in."""
    clock, let_in = Time(), deque[tuple[float, int]]()
    each = limiter(Rates(requests, tokens), clock)
    for pause, size in asked:
        clock.now += pause
        if size > tokens:
            with pytest.raises(RequestError):
                each.admit("a", size, {})
            continue
        wait = wait_of(each, "a", size)
        if wait and size % 3 == 0:
            clock.now += wait
            wait = wait_of(each, "a", size)
            assert not wait, "it was told when it fits"
        if not wait:
            let_in.append((clock.now, size))
        while let_in and let_in[0][0] < clock.now - 60:
            let_in.popleft()
        assert len(let_in) <= 2 * requests
        assert sum(each for _, each in let_in) <= 2 * tokens + 1


def test_every_request_that_the_limit_allows_is_let_in_at_once() -> None:
    for limit in (1, 7, 13, 59, 61, 997):
        each = limiter(Rates(requests=limit), Time())
        assert [wait_of(each, "q", 10**9) for _ in range(limit)] == [0.0] * limit
        assert wait_of(each, "q", 0) == pytest.approx(60 / limit)


def test_what_is_generated_is_paid_by_those_who_follow() -> None:
    clock, headers = Time(), dict[str, str]()
    each = limiter(Rates(tokens=300), clock)
    charge = each.admit("q", 100, headers)
    assert charge is not None
    assert headers == {
        "x-ratelimit-limit-tokens": "300",
        "x-ratelimit-remaining-tokens": "200",
        "x-ratelimit-reset-tokens": "20s",
    }
    assert set(headers) < set(HEADERS)
    charge.close(500)
    assert wait_of(each, "q", 50) == pytest.approx(70), "350 tokens at 5 a second"
    assert wait_of(each, "another", 300) == 0.0
    clock.now += 69.9
    with pytest.raises(CapacityError, match=r"300 tokens a minute\. Try again in 100ms") as caught:
        each.admit("q", 50, headers)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    assert headers["x-ratelimit-remaining-tokens"] == "49"
    clock.now += 0.1
    assert wait_of(each, "q", 50) == 0.0


def test_what_the_server_could_not_serve_costs_nothing_and_what_it_began_does() -> None:
    each = limiter(Rates(2, 100), Time())
    for _ in range(5):
        charge = each.admit("q", 90, {})
        assert charge is not None
        charge.close(0, failed=True)
    charge = each.admit("q", 90, {})
    assert charge is not None
    charge.close(10, failed=True)
    assert wait_of(each, "q", 10) == pytest.approx(6)


def test_both_limits_or_none() -> None:
    refused: list[str] = []
    each = limiter(Rates(3, 100), Time(), refused)
    assert wait_of(each, "q", 80) == 0
    assert wait_of(each, "q", 40) == pytest.approx(12)
    assert [wait_of(each, "q", 10) for _ in range(2)] == [0, 0], "what was refused was charged by neither"
    assert wait_of(each, "q", 0) == pytest.approx(20)
    assert refused == ["tokens", "requests"]


def test_a_prompt_that_never_fits_is_no_matter_of_waiting() -> None:
    with pytest.raises(RequestError, match="101 tokens, which is more than") as caught:
        limiter(Rates(tokens=100), Time()).admit("q", 101, {})
    assert (caught.value.status, caught.value.code) == (400, "prompt_exceeds_rate_limit")


def test_a_limit_that_changes_keeps_the_part_that_was_used() -> None:
    clock, now = Time(), Rates(requests=4)
    each = RateLimiter(lambda _: now, Ledger(), print, clock)
    assert [wait_of(each, "q", 0) for _ in range(2)] == [0, 0]
    now, headers = Rates(requests=40), {}
    each.admit("q", 0, headers)
    assert headers["x-ratelimit-remaining-requests"] == "19"
    now = Rates()
    assert each.admit("q", 10**6, {}) is None
