"""Finds out before a request is submitted whether its constraint can be enforced.

Invariants: checked in a thread, because compiling a large schema takes long; a constraint that passed is not compiled
again while it is among the newest. Nothing is loaded before the first constraint.
Knows nothing of bodies or of how constraints are enforced.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from stoker_runtime.errors import RequestError
from stoker_runtime.request import Constraint
from stoker_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_KNOWN = 256


class ConstraintChecker:
    """What was found possible so far. Use from one event loop."""

    def __init__(self) -> None:
        self._alphabet: LLTokenizer | None = None
        self._known: OrderedDict[Constraint, None] = OrderedDict()

    async def check(self, constraint: Constraint, tokenizer: Tokenizer, param: str) -> Constraint:
        """`constraint`, or RequestError that blames the field `param` and says which keyword it is about."""
        if constraint not in self._known:
            try:
                await asyncio.to_thread(self._check, constraint, tokenizer)
            except RequestError as error:
                raise RequestError(f"{param}: {error.message}", param=param, code="invalid_constraint") from error
            if len(self._known) >= MAX_KNOWN:
                self._known.popitem(last=False)
        self._known[constraint] = None
        self._known.move_to_end(constraint)
        return constraint

    def _check(self, constraint: Constraint, tokenizer: Tokenizer) -> None:
        from stoker_runtime.sampling import grammar

        if self._alphabet is None:
            self._alphabet = grammar.build_byte_tokenizer(tokenizer)
        # What comes before an answer is the server's own, and may name the model's tokens by their ids.
        grammar.check(replace(constraint, lead=""), self._alphabet)
