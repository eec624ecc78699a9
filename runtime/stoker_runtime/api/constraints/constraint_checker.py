"""Finds out before a request is submitted whether its constraint can be enforced.

Invariants: checked in threads of its own, because compiling a large schema takes long: nobody else waits for one, and
who waits is answered after WAIT_SECONDS. A constraint that passed is not compiled again while it is among the newest.
Nothing is loaded before the first constraint.
Knows nothing of bodies or of how constraints are enforced.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from stoker_runtime.errors import CapacityError, RequestError
from stoker_runtime.request import Constraint
from stoker_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_KNOWN = 256
MAX_CHARACTERS = 256 * 1024
"""Of a schema or a grammar; compiling takes up to the square of it, some ten seconds."""
WAIT_SECONDS = 30.0
THREADS = 2


class ConstraintChecker:
    """What was found possible so far. Use from one event loop."""

    def __init__(self, wait: float = WAIT_SECONDS) -> None:
        """`wait`: seconds that a request waits for its constraint."""
        self._alphabet: LLTokenizer | None = None
        self._known: OrderedDict[Constraint, None] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="constraints")
        self._wait = wait

    async def check(self, constraint: Constraint, tokenizer: Tokenizer, param: str) -> Constraint:
        """`constraint`, or RequestError that blames the field `param` and says which keyword it is about.

        Raises CapacityError where those of others take too long.
        """
        if len(constraint.text) > MAX_CHARACTERS:
            raise RequestError(
                f"{param} comes to {len(constraint.text)} characters of schema or grammar; at most {MAX_CHARACTERS} "
                "are allowed. Make it smaller.",
                param=param,
                code="invalid_constraint",
            )
        if constraint not in self._known:
            try:
                await self._checked(constraint, tokenizer)
            except RequestError as error:
                raise RequestError(f"{param}: {error.message}", param=param, code="invalid_constraint") from error
            if len(self._known) >= MAX_KNOWN:
                self._known.popitem(last=False)
        self._known[constraint] = None
        self._known.move_to_end(constraint)
        return constraint

    async def _checked(self, constraint: Constraint, tokenizer: Tokenizer) -> None:
        found = self._threads.submit(self._check, constraint, tokenizer)
        done, _ = await asyncio.wait([asyncio.wrap_future(found)], timeout=self._wait)
        if done:
            found.result()
        elif found.cancel():
            raise CapacityError("The constraints of other requests are being compiled; try again.")
        else:
            raise RequestError(f"it takes more than {self._wait:g} seconds to compile; make it simpler.")

    def _check(self, constraint: Constraint, tokenizer: Tokenizer) -> None:
        from stoker_runtime.sampling import grammar

        if self._alphabet is None:
            self._alphabet = grammar.build_byte_tokenizer(tokenizer)
        # What comes before an answer is the server's own, and may name the model's tokens by their ids.
        grammar.check(replace(constraint, lead=""), self._alphabet)
