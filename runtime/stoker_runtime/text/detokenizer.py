"""Turn a sequence's tokens into text as they come: UTF-8 safe, with stop strings found across token boundaries.

Invariants: the text given out, joined, is what decoding all tokens at once gives, cut before (or after) the first
stop string; nothing that may still become a stop string is given out; each token costs time in its own length
and the longest stop string, whatever the text's length.
Knows nothing of requests, streams or HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from stoker_runtime.text.tokenizer import Tokenizer

_NewDecoder = codecs.getincrementaldecoder("utf-8")
NOTHING: frozenset[int] = frozenset()


class Detokenizer:
    """The text side of one sequence. `stopped_by` is the stop string that ended it, once one has."""

    __slots__ = ("_bytes_of", "_decode", "_held", "_include_stop", "_longest", "_skip", "_stops", "stopped_by")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
        visible: frozenset[int] = NOTHING,
    ) -> None:
        """`visible` special tokens are text even where special tokens are skipped."""
        self._bytes_of = tokenizer.bytes_of
        self._skip = tokenizer.special_ids - visible if skip_special else NOTHING
        self._decode = _NewDecoder(errors="replace").decode
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include_stop = include_stop
        self._held = ""
        self.stopped_by: str | None = None

    @property
    def searches(self) -> bool:
        """Whether it looks for stop strings: without any, tokens may come in pieces of any length."""
        return bool(self._stops)

    def push(self, tokens: Sequence[int], search: bool = True) -> str:
        """The text that is certain after `tokens`. Without `search` they count as text before any stop string.

        After a stop string was found the rest of `tokens` gives no text.
        """
        if self.stopped_by is not None:
            return ""
        fresh = self._decode(self._bytes_of(tokens, self._skip))
        if not self._stops:
            return fresh
        if not search:
            held, self._held = self._held, ""
            return held + fresh
        return self._scan(self._held + fresh) if fresh else ""

    def finish(self) -> str:
        """The rest of the text when the sequence has ended: what was held back, and bytes left incomplete."""
        rest = self._decode(b"", True)
        if self.stopped_by is not None:
            return ""
        text, self._held = self._held + rest, ""
        if not (rest and self._stops):
            return text
        certain = self._scan(text)
        return certain + self._held

    def _scan(self, text: str) -> str:
        # The match that is complete first wins, so that how tokens cut the text does not change the answer.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stopped_by = min(found)
            self._held = ""
            return text[: at + len(self.stopped_by)] if self._include_stop else text[:at]
        keep = self._unsure(text)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep] if keep else text

    def _unsure(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
