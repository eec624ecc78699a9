"""Constraints are compiled in threads of their own, and nobody waits for one without an end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from stoker_runtime.api.constraints import constraint_checker
from stoker_runtime.api.constraints.constraint_checker import ConstraintChecker
from stoker_runtime.errors import CapacityError, RequestError
from stoker_runtime.request import Constraint, ConstraintKind
from stoker_runtime.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.synthetic(300)


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


async def test_who_waits_for_a_constraint_is_answered_and_files_are_read_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(ConstraintChecker, "_check", lambda *_: go_on.wait(20))
    checker = ConstraintChecker(wait=0.2)
    checks = [checker.check(regex(f"a{at}"), TOKENIZER, "guided_regex") for at in range(17)]
    try:
        found = await asyncio.gather(*checks, return_exceptions=True)
        assert await asyncio.wait_for(asyncio.to_thread(len, "abc"), 5) == 3
    finally:
        go_on.set()
    kinds = [type(each) for each in found]
    assert kinds.count(RequestError) == constraint_checker.THREADS
    assert kinds.count(CapacityError) == 17 - constraint_checker.THREADS
    slow = next(str(each) for each in found if isinstance(each, RequestError))
    assert slow == "guided_regex: it takes more than 0.2 seconds to compile; make it simpler."


async def test_a_large_constraint_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(RequestError, match="guided_grammar comes to 300001 characters of schema or grammar; at most"):
        await ConstraintChecker().check(regex("b" * 300_001), TOKENIZER, "guided_grammar")
