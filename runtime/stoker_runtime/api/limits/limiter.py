"""Lets requests in as far as their owner's rate limits go, and counts what they used.

Invariants: a request is let in by both limits or charged by neither. Its prompt is charged when it is let in, what is
generated when it ends; one that the server could not serve costs nothing. Whoever is refused is told after how many
seconds the same request fits, and one that never fits is told that.
Knows nothing of how requests are answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress

from stoker_runtime.api.limits.ledger import REQUESTS, TOKENS, Ledger
from stoker_runtime.api.limits.rule import Rates, given_back, remaining, taken, wait
from stoker_runtime.errors import CapacityError, RequestError

REFUSED = "rate_limit_exceeded"
HEADERS = tuple(
    f"x-ratelimit-{part}-{kind}" for part in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
)
"""The headers that answers carry, OpenAI's names."""


class Charge:
    """What one request was charged: itself and its prompt. `close` it once."""

    def __init__(self, limiter: RateLimiter, owner: str, rates: Rates, tokens: int) -> None:
        self._limiter = limiter
        self._owner = owner
        self._rates = rates
        self._tokens = tokens

    def close(self, generated: int, *, failed: bool = False) -> None:
        """The request ended after so many tokens. `failed`: by the server's fault, so without any it costs nothing."""
        if failed and not generated:
            self._limiter.give_back(self._owner, self._rates, self._tokens)
        elif generated and self._rates.tokens:
            self._limiter.add(self._owner, self._rates, generated)


class RateLimiter:
    """The rate limits of one server. `rates` says an owner's; "" is the owner where the server has no keys."""

    def __init__(
        self,
        rates: Callable[[str], Rates],
        ledger: Ledger,
        refused: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`refused` is told which limit refused a request. `clock` is one that all processes of the machine share."""
        self._rates = rates
        self._ledger = ledger
        self._refused = refused
        self._clock = clock

    def admit(self, owner: str, tokens: int, headers: MutableMapping[str, str]) -> Charge | None:
        """Charge a request whose prompts have `tokens`, and put into `headers` what its answer tells of the limits.

        None where nothing limits the owner. Raises CapacityError while it does not fit, RequestError where it never
        will.
        """
        rates = self._rates(owner)
        if not rates:
            return None
        if rates.tokens and tokens > rates.tokens:
            raise RequestError(
                f"The prompt has {tokens} tokens, which is more than the rate limit allows in a whole minute: "
                f"{rates.tokens}. Make it shorter; to wait does not help.",
                code="prompt_exceeds_rate_limit",
            )
        now = self._clock()
        with self._ledger.account(owner, now) as account:
            late = {
                "requests": wait(account[REQUESTS], 1, rates.requests, now),
                "tokens": wait(account[TOKENS], tokens, rates.tokens, now),
            }
            if not any(late.values()):
                account[REQUESTS] = taken(account[REQUESTS], 1, rates.requests, now)
                account[TOKENS] = taken(account[TOKENS], tokens, rates.tokens, now)
            headers.update(_told("requests", account[REQUESTS], rates.requests, now))
            headers.update(_told("tokens", account[TOKENS], rates.tokens, now))
        if any(late.values()):
            raise self._refusal(late, rates)
        return Charge(self, owner, rates, tokens)

    # A table that has no slot left now must not end a request that was answered.

    def add(self, owner: str, rates: Rates, tokens: int) -> None:
        """Charge tokens that were generated, also beyond the limit: what is owed is waited for by those who follow."""
        now = self._clock()
        with suppress(CapacityError), self._ledger.account(owner, now) as account:
            account[TOKENS] = taken(account[TOKENS], tokens, rates.tokens, now)

    def give_back(self, owner: str, rates: Rates, tokens: int) -> None:
        """Take back the charge for a request and its prompt."""
        with suppress(CapacityError), self._ledger.account(owner, self._clock()) as account:
            account[REQUESTS] = given_back(account[REQUESTS], 1, rates.requests)
            account[TOKENS] = given_back(account[TOKENS], tokens, rates.tokens)

    def _refusal(self, late: dict[str, float], rates: Rates) -> CapacityError:
        kind = max(late, key=lambda each: late[each])
        limit = rates.requests if kind == "requests" else rates.tokens
        self._refused(kind)
        error = CapacityError(
            f"The rate limit is reached: {limit} {kind} a minute. Try again in {_duration(late[kind])}.", code=REFUSED
        )
        error.retry_after = late[kind]
        return error


def _told(kind: str, full_at: float, limit: int, now: float) -> dict[str, str]:
    """The headers of one limit; none where there is none."""
    if not limit:
        return {}
    return {
        f"x-ratelimit-limit-{kind}": str(limit),
        f"x-ratelimit-remaining-{kind}": str(remaining(full_at, limit, now)),
        f"x-ratelimit-reset-{kind}": _duration(max(0.0, full_at - now)),
    }


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    text = f"{rest:.3f}".rstrip("0").rstrip(".")
    return f"{int(minutes)}m{text}s" if minutes else f"{text}s"
