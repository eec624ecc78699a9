"""The server's API keys: those of its flags and those of a file, which is read again when it changes.

A line of the file is a key, and what holds for it: `KEY name=team-a expires=2031-01-31 quota=600/h rpm=60 tpm=90000`.
What a key makes belongs to its name, so that a key can be replaced; a key without a name owns by itself.
Invariants: a key is compared in constant time with every key, and only its digest is kept. A file that cannot be
read any more, or holds no key, changes nothing: the keys that were valid stay valid, and the log says so once.
Knows nothing of HTTP beyond the two headers that carry a key.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from stoker_runtime.errors import AuthenticationError, CapacityError, ConfigError

CHECK_SECONDS = 1.0
"""How long a change of the file may go unseen."""
PERIODS = {"m": 60.0, "h": 3600.0, "d": 86_400.0}
ATTRIBUTES = ("name", "expires", "quota", "rpm", "tpm")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Quota:
    """So many requests in so many seconds."""

    requests: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Allowance:
    """Requests and tokens a minute of one owner, where they are not the server's: None = they are, 0 = no limit."""

    rpm: int | None = None
    tpm: int | None = None


NO_ALLOWANCE = Allowance()


@dataclass(frozen=True, slots=True)
class Key:
    """A key by its digest. `owner` is who owns what it makes; `expires` in seconds since 1970."""

    digest: bytes
    owner: str
    expires: float = math.inf
    quota: Quota | None = None
    allowance: Allowance = NO_ALLOWANCE


def plain_key(text: str) -> Key:
    """A key of which nothing is said; it owns by itself."""
    key = text.encode()
    return Key(_digest(key), f"key:{hashlib.sha256(b'owner ' + key).hexdigest()[:32]}")


def read_keys(path: Path) -> list[Key]:
    """One key a line; empty lines and those that begin with # are none. Raises ConfigError, which shows no key."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The API key file {path} cannot be read: {error}.", param="api-key-file") from error
    keys: list[Key] = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            keys.append(_read_line(line.split(), f"{path}, line {number}"))
            _check_against(keys[-1], keys[:-1], f"{path}, line {number}")
    if not keys:
        raise ConfigError(f"The API key file {path} holds no key.", param="api-key-file")
    return keys


def _check_against(key: Key, others: Sequence[Key], where: str) -> None:
    """Raise ConfigError where `key` and one of the `others` cannot both hold."""
    if key.digest in [other.digest for other in others]:
        raise ConfigError(f"{where}: this key stands there twice.", param="api-key-file")
    if any(other.owner == key.owner and other.allowance != key.allowance for other in others):
        raise ConfigError(
            f"{where}: rpm= and tpm= are the name's, which has several keys; write the same at each of them.",
            param="api-key-file",
        )


def _read_line(words: Sequence[str], where: str) -> Key:
    key = plain_key(words[0])
    given: dict[str, str] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if name not in ATTRIBUTES or not equals or not value or name in given:
            near = difflib.get_close_matches(name, ATTRIBUTES, n=1)
            hint = f" Did you mean {near[0]}=…?" if near and name not in ATTRIBUTES else ""
            raise ConfigError(
                f"{where}: behind a key may stand {', '.join(f'{each}=…' for each in ATTRIBUTES)}, each once.{hint}",
                param="api-key-file",
            )
        given[name] = value
    owner = f"name:{given['name']}" if "name" in given else key.owner
    allowance = Allowance(*(_a_minute(name, given.get(name), where) for name in ("rpm", "tpm")))
    return Key(key.digest, owner, _expiry(given.get("expires"), where), _quota(given.get("quota"), where), allowance)


def _a_minute(name: str, value: str | None, where: str) -> int | None:
    if value is None:
        return None
    if re.fullmatch(r"\d{1,12}", value, re.ASCII) is None:
        what = "requests" if name == "rpm" else "tokens"
        raise ConfigError(
            f"{where}: {name} is {value[:40]!r}; it must be a number of {what} a minute, 0 for no limit.",
            param="api-key-file",
        )
    return int(value)


def _expiry(value: str | None, where: str) -> float:
    if value is None:
        return math.inf
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        raise ConfigError(
            f"{where}: expires is {value[:40]!r}; it must be a date, such as 2031-01-31, or a time, such as "
            "2031-01-31T12:00:00Z.",
            param="api-key-file",
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _quota(value: str | None, where: str) -> Quota | None:
    if value is None:
        return None
    found = re.fullmatch(r"([1-9]\d{0,11})/([mhd])", value, re.ASCII)
    if found is None:
        raise ConfigError(
            f"{where}: quota is {value[:40]!r}; it must be requests a minute, hour or day, such as 600/h.",
            param="api-key-file",
        )
    return Quota(int(found[1]), PERIODS[found[2]])


class KeyRing:
    """Whose key a request carries; without keys everything passes, and belongs to all."""

    def __init__(
        self,
        keys: Sequence[str],
        file: str = "",
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        processes: int = 1,
    ) -> None:
        """`keys` hold for ever, those in `file` as long as they stand there. Raises ConfigError.

        Each of several `processes` counts its part of a quota.
        """
        self._fixed = [plain_key(key) for key in keys]
        self._file = Path(file) if file else None
        self._clock = clock
        self._now = now
        self._processes = processes
        self._problem = ""
        self._checked = clock()
        self._seen = _stamp(self._file)
        self._from_file = read_keys(self._file) if self._file else []
        self._allowances = {key.owner: key.allowance for key in self._from_file}
        self._used: dict[tuple[str, float], tuple[float, int]] = {}

    def owner(self, headers: Mapping[str, str]) -> str:
        """Who owns what this request makes; "" where the server has no keys. Raises AuthenticationError."""
        key = self._find(headers)
        return key.owner if key is not None else ""

    def allowance(self, owner: str) -> Allowance:
        """What the file says of an owner's rate limits; of one whose keys are gone, nothing."""
        self._look()
        return self._allowances.get(owner, NO_ALLOWANCE)

    def spend(self, headers: Mapping[str, str]) -> str:
        """As `owner`, and count the request. Raises AuthenticationError, or CapacityError beyond the key's quota."""
        key = self._find(headers)
        if key is None:
            return ""
        if key.quota is not None:
            self._count(key.owner, key.quota)
        return key.owner

    def _find(self, headers: Mapping[str, str]) -> Key | None:
        """Compare with every key, so that the time taken says nothing about which one was near.

        The key comes as `authorization: Bearer KEY`, or as `x-api-key: KEY`, which Anthropic's clients send.
        """
        self._look()
        keys = self._fixed + self._from_file
        if not keys:
            return None
        scheme, _, text = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            text = headers.get("x-api-key", "")
        # Header bytes come decoded as latin-1.
        given = _digest(text.strip().encode("latin-1", "replace"))
        found: Key | None = None
        for key in keys:
            if hmac.compare_digest(given, key.digest):
                found = key
        if found is None:
            raise AuthenticationError("The API key is missing or wrong.", code="invalid_api_key")
        if found.expires <= self._now():
            raise AuthenticationError("The API key has expired.", code="expired_api_key")
        return found

    def _count(self, owner: str, quota: Quota) -> None:
        """One request more in the period that runs. Raises CapacityError where that is one too many."""
        now = self._clock()
        began, used = self._used.get((owner, quota.seconds), (now, 0))
        if now - began >= quota.seconds:
            began, used = now, 0
        if used >= math.ceil(quota.requests / self._processes):
            error = CapacityError(
                f"The quota of this API key is used up: {quota.requests} requests in {quota.seconds:g} seconds.",
                code="quota_exceeded",
            )
            error.retry_after = began + quota.seconds - now
            raise error
        self._used[(owner, quota.seconds)] = (began, used + 1)

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
            self._from_file = read_keys(file)
        except ConfigError as error:
            self._problem = f"{error.message} The keys that were valid stay valid."
            log.error("%s", self._problem)
            return
        self._allowances = {key.owner: key.allowance for key in self._from_file}
        self._problem = ""
        log.info("read %d API keys from %s, which changed", len(self._from_file), file)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _stamp(path: Path | None) -> tuple[int, ...]:
    """What changes with a file, also where a mounted secret is swapped under a symbolic link."""
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_size) if found is not None else ()
