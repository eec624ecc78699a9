"""The server's API keys: those of its flags and those of a file, which is read again when it changes.

Invariants: a key is compared in constant time with every key, and only its digest is kept. A file that cannot be
read any more, or holds no key, changes nothing: the keys that were valid stay valid, and the log says so once.
Knows nothing of HTTP beyond the two headers that carry a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stoker_runtime.errors import ConfigError

CHECK_SECONDS = 1.0
"""How long a change of the file may go unseen."""

log = logging.getLogger(__name__)


def read_keys(path: Path) -> list[str]:
    """One key a line; empty lines and those that begin with # are none. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The API key file {path} cannot be read: {error}.", param="api-key-file") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"The API key file {path} holds no key.", param="api-key-file")
    return keys


class KeyRing:
    """Whether a request carries one of the server's API keys; without keys everything passes."""

    def __init__(self, keys: Sequence[str], file: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """`keys` hold for ever, those in `file` as long as they stand there. Raises ConfigError."""
        self._fixed = [_digest(key.encode()) for key in keys]
        self._file = Path(file) if file else None
        self._clock = clock
        self._problem = ""
        self._checked = clock()
        self._seen = _stamp(self._file)
        self._from_file = [_digest(key.encode()) for key in read_keys(self._file)] if self._file else []

    def allows(self, headers: Mapping[str, str]) -> bool:
        """Compare with every key, so that the time taken says nothing about which one was near.

        The key comes as `authorization: Bearer KEY`, or as `x-api-key: KEY`, which Anthropic's clients send.
        """
        self._look()
        digests = self._fixed + self._from_file
        if not digests:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        # Header bytes come decoded as latin-1.
        given = _digest(key.strip().encode("latin-1", "replace"))
        found = False
        for digest in digests:
            found |= hmac.compare_digest(given, digest)
        return found

    def problem(self) -> str:
        """What is wrong with the file of keys as it is now; "" = nothing."""
        self._look()
        return self._problem

    def _look(self) -> None:
        if self._file is not None and self._clock() - self._checked >= CHECK_SECONDS:
            self._reload(self._file)

    def _reload(self, file: Path) -> None:
        self._checked = self._clock()
        stamp = _stamp(file)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            keys = read_keys(file)
        except ConfigError as error:
            self._problem = f"{error.message} The keys that were valid stay valid."
            log.error("%s", self._problem)
            return
        self._problem = ""
        self._from_file = [_digest(key.encode()) for key in keys]
        log.info("read %d API keys from %s, which changed", len(keys), file)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _stamp(path: Path | None) -> tuple[int, ...]:
    """What changes with a file, also where a mounted secret is swapped under a symbolic link."""
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_size) if found is not None else ()
