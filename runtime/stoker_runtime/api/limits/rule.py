"""The rule of a rate limit: a bucket that holds one minute's worth, and fills evenly.

A bucket is one number: the time at which it is full again. What is taken from it puts that time off, by what the
taking costs at the bucket's rate; it may be taken while the time is at most a minute off. (The virtual scheduling form
of the generic cell rate algorithm, ITU-T I.371.)
Invariants: pure. A bucket that is full is the same as one that was never used, whatever its limit was; a limit that
changes keeps what was used as the same part of a minute. A debt (what was taken without asking) waits to be paid back.
Knows nothing of keys, processes or HTTP. Times are in seconds, by one clock.
"""

from __future__ import annotations

from dataclasses import dataclass

PERIOD = 60.0
_ROUNDING = 1e-6
"""Sums of fractions of a minute must not refuse the last one that the limit allows."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What may be asked for in a minute; 0: without limit."""

    requests: int = 0
    tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.requests or self.tokens)


def wait(full_at: float, cost: int, limit: int, now: float) -> float:
    """Seconds until `cost` can be taken, 0 where it can be now. `cost` is at most `limit`; a limit of 0 is none."""
    if not limit:
        return 0.0
    left = max(full_at, now) + cost * PERIOD / limit - PERIOD - now
    return left if left > _ROUNDING else 0.0


def taken(full_at: float, cost: int, limit: int, now: float) -> float:
    """When the bucket is full again once `cost` was taken, whether or not it could be."""
    return max(full_at, now) + cost * PERIOD / limit if limit else full_at


def given_back(full_at: float, cost: int, limit: int) -> float:
    """When the bucket is full again once `cost`, which was taken before, came back."""
    return full_at - cost * PERIOD / limit if limit else full_at


def remaining(full_at: float, limit: int, now: float) -> int:
    """What could be taken now."""
    return max(0, int(limit * (1 - max(0.0, full_at - now) / PERIOD) + _ROUNDING))
