"""Every way a fetch can fail. The class name is the reason that the operator puts in a condition.

    FetchError
    ├── somebody has to change something first: exit status 3
    │   ├── BadRequest          a URI, glob, digest or endpoint that names nothing possible
    │   ├── ModelNotFound       no such repository, folder or file
    │   ├── RevisionNotFound    the repository has no such branch, tag or commit
    │   ├── TokenRejected       401 or 403: the token is missing, wrong or has no access
    │   ├── VolumeFull          the volume has, or had, too little room
    │   └── NotPublished        `--verify-only`: nothing was published here
    └── trying again may help: exit status 1
        ├── HubUnreachable      no connection, or it broke more often than the retries allow
        ├── ChecksumMismatch    bytes that arrived, or lie on the volume, are not the bytes promised
        ├── Interrupted         told to stop; partial files stay for the next run (exit status 143)
        └── FetchFailed         anything else: a server's error, a deadline, an unusable volume

Knows nothing of how an error is shown; `cli.py` maps it once to stderr, the termination message and the exit
status.
"""

from __future__ import annotations

from typing import ClassVar

from stoker_runtime.errors import StokerError


class FetchError(StokerError):
    """Base of all fetch errors."""

    type = "fetch_error"
    exit_status: ClassVar[int] = 1

    @property
    def reason(self) -> str:
        """The CamelCase reason, as conditions and events show it."""
        return type(self).__name__


class BadRequest(FetchError):
    """The order names nothing possible."""

    exit_status = 3


class ModelNotFound(FetchError):
    """The hub, folder or web server has no such repository or file."""

    exit_status = 3


class RevisionNotFound(FetchError):
    """The repository has no such branch, tag or commit."""

    exit_status = 3


class TokenRejected(FetchError):
    """The token is missing, wrong, or has no access to the repository."""

    exit_status = 3


class VolumeFull(FetchError):
    """The volume has, or had, too little room."""

    exit_status = 3


class NotPublished(FetchError):
    """There is no published model where `--verify-only` looks."""

    exit_status = 3


class HubUnreachable(FetchError):
    """No connection, or it broke more often than the retries allow."""


class ChecksumMismatch(FetchError):
    """Bytes differ from what the source or the manifest promised."""


class Interrupted(FetchError):
    """SIGTERM or Ctrl-C."""

    exit_status = 143


class FetchFailed(FetchError):
    """A server's error, a deadline that is over, or a volume that cannot be used."""
