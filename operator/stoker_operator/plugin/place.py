"""Where services are: in a cluster, or in a `stoker up` on this machine. The same questions to both.

Invariants: reads only.
Knows nothing of what is done with the answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stoker_operator.local.record import read_records
from stoker_operator.manifests.identity import INSTANCE, MANAGED_BY
from stoker_operator.plugin.errors import PluginError
from stoker_operator.plugin.kubectl import Kubectl

Object = dict[str, Any]
RESOURCE = "inferenceservices.stoker.dev"


@dataclass(frozen=True, slots=True)
class Log:
    """One container's log. `previous`: of the container before the last restart."""

    pod: str
    container: str
    previous: bool = False


class Place(Protocol):
    """Answers about services. Each method raises PluginError where there is no answer."""

    def services(self) -> list[Object]:
        """Every service of the namespace."""
        ...

    def service(self, name: str) -> Object:
        """The one of this name."""
        ...

    def pods(self, service: Object) -> list[Object]:
        """The pods of its engine and of its prefetches."""
        ...

    def events(self, service: Object) -> list[Object]:
        """What was recorded of it, oldest first."""
        ...

    def log(self, log: Log, *, tail: int, follow: bool) -> Iterator[str]:
        """The lines of a log, each with its end."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """A namespace of a cluster, by kubectl."""

    kubectl: Kubectl

    def services(self) -> list[Object]:
        """Every service of the namespace."""
        return self.kubectl.items(RESOURCE)

    def service(self, name: str) -> Object:
        """The one of this name."""
        return self.kubectl.get(RESOURCE, name)

    def pods(self, service: Object) -> list[Object]:
        """By label; a pod of a namesake that is gone is not among them, for its owner is gone too."""
        return self.kubectl.items("pods", f"--selector={MANAGED_BY}=stoker,{INSTANCE}={service['metadata']['name']}")

    def events(self, service: Object) -> list[Object]:
        """Those of this very object, not of an earlier one of its name."""
        wanted = f"--field-selector=involvedObject.uid={service['metadata']['uid']}"
        return sorted(self.kubectl.items("events", wanted), key=event_time)

    def log(self, log: Log, *, tail: int, follow: bool) -> Iterator[str]:
        """As `kubectl logs` prints them."""
        more = [flag for flag, given in (("--follow", follow), ("--previous", log.previous)) if given]
        yield from self.kubectl.lines("logs", log.pod, f"--container={log.container}", f"--tail={tail}", *more)


@dataclass(frozen=True, slots=True)
class UpPlace:
    """A `stoker up` on this machine, by what it writes down in its folder of data."""

    data: Path

    def services(self) -> list[Object]:
        """Every service that runs."""
        return [record["service"] for record in read_records(self.data)]

    def service(self, name: str) -> Object:
        """The one of this name."""
        found: Object = self.record(name)["service"]
        return found

    def record(self, name: str) -> Object:
        """What is written down of one service: its object, url, pods and events."""
        records = {str(record["service"]["metadata"]["name"]): record for record in read_records(self.data)}
        if name not in records:
            there = f"; there is {', '.join(records)}" if records else ""
            raise PluginError(f"no `stoker up` on this machine runs {name!r} from {self.data}{there}.")
        return records[name]

    def pods(self, service: Object) -> list[Object]:
        """The pods of its engine and of its prefetches."""
        found: list[Object] = self.record(service["metadata"]["name"])["pods"]
        return found

    def events(self, service: Object) -> list[Object]:
        """The last ones, oldest first."""
        found: list[Object] = self.record(service["metadata"]["name"])["events"]
        return found

    def log(self, log: Log, *, tail: int, follow: bool) -> Iterator[str]:
        """The end of the file that the process writes; one file holds all starts of a container."""
        if follow:
            raise PluginError(f"of a `stoker up`, follow the file: tail -f {self._file(log)}")
        try:
            lines = self._file(log).read_text(errors="replace").splitlines(keepends=True)
        except OSError as error:
            raise PluginError(f"{self._file(log)}: {error.strerror}.") from None
        yield from lines[-tail:] if tail >= 0 else lines

    def _file(self, log: Log) -> Path:
        return self.data / "logs" / log.pod / f"{log.container}.log"


def event_time(event: Mapping[str, Any]) -> str:
    """When an event was last seen, as Kubernetes writes it; "" where it does not say."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")


def ready_of(service: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its Ready condition; an empty one before the operator has seen it."""
    found = (item for item in (service.get("status") or {}).get("conditions") or () if item["type"] == "Ready")
    return next(found, {"status": "Unknown", "reason": "", "message": ""})
