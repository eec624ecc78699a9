"""From a container of a manifest to a process of this machine: command, environment, paths, ports. Pure.

    stoker …                    → this interpreter's stoker
    /models/…, /source/…        → the folder that stands for the volume
    /dev/termination-log        → a file of its own
    --port 8000 (a named port)  → the free port that was chosen for it, on loopback

Invariants: a secret goes into the process's environment and nowhere else; a reference that nothing answers is an error
that names it in the kubelet's words, so that the operator's diagnosis reads it.
Knows nothing of processes that run.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker_operator.manifests.pod import TERMINATION_LOG

Object = Mapping[str, Any]
LOOPBACK = "127.0.0.1"
# The host's environment is passed on, since it decides where Python and CUDA find what `pip install` brought; the
# engine's own settings are not: a manifest must mean the same here as in a cluster.
_OWN_SETTINGS = "STOKER_"


class ReferenceMissing(Exception):
    """A Secret or ConfigMap that the manifest refers to is not there; the message is the kubelet's."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A container as a process. `termination_log` is the file the container knows as /dev/termination-log."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    termination_log: Path


@dataclass(frozen=True, slots=True)
class Machine:
    """What stands in for the cluster around a pod.

    `folders`: volume name → folder. `ports`: port in the manifest → port on loopback. `secrets` and `config_maps`:
    name → key → value. `gpus`: the indices of the GPUs that the pod may use.
    """

    folders: Mapping[str, Path]
    ports: Mapping[int, int]
    secrets: Mapping[str, Mapping[str, str]]
    config_maps: Mapping[str, Mapping[str, str]]
    host_environment: Mapping[str, str]
    gpus: Sequence[int]
    logs: Path


def map_container(container: Object, machine: Machine) -> Mapped:
    """The process for `container`. Raises ReferenceMissing."""
    paths = _paths(container, machine)
    log = machine.logs / f"{container['name']}.termination"
    paths[TERMINATION_LOG] = str(log)
    words = [*container.get("command", ()), *container.get("args", ())]
    command = [_path(word, paths) for word in words]
    command = _ports(command, machine.ports)
    if command[:1] == ["stoker"]:
        command[:1] = [sys.executable, "-m", "stoker_cli"]
    environment = {
        name: value for name, value in machine.host_environment.items() if not name.startswith(_OWN_SETTINGS)
    }
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, machine.gpus))
    for source in container.get("envFrom", ()):
        environment |= _referred_all(source, machine)
    for entry in container.get("env", ()):
        environment[entry["name"]] = _path(_value(entry, machine), paths)
    return Mapped(container["name"], tuple(command), environment, log)


def _paths(container: Object, machine: Machine) -> dict[str, str]:
    mounts = container.get("volumeMounts", ())
    return {
        mount["mountPath"]: str(machine.folders[mount["name"]]) for mount in mounts if mount["name"] in machine.folders
    }


def _path(word: str, paths: Mapping[str, str]) -> str:
    """`word` with a mounted path, also behind file://, replaced by the folder that stands for it."""
    scheme, bare = ("file://", word[7:]) if word.startswith("file://") else ("", word)
    for mount, folder in paths.items():
        if bare == mount or bare.startswith(f"{mount}/"):
            return f"{scheme}{folder}{bare[len(mount) :]}"
    return word


def _ports(command: list[str], ports: Mapping[int, int]) -> list[str]:
    """Replace the values of port flags, and listen on loopback only."""
    mapped: list[str] = []
    for flag, word in zip(["", *command], command, strict=False):
        if flag.endswith("port") and word.isdigit() and int(word) in ports:
            mapped.append(str(ports[int(word)]))
            if flag == "--progress-port":
                mapped += ["--progress-host", LOOPBACK]
        else:
            mapped.append(LOOPBACK if flag == "--host" else word)
    return mapped


def _value(entry: Object, machine: Machine) -> str:
    if "valueFrom" not in entry:
        return str(entry.get("value", ""))
    source = entry["valueFrom"]
    if "secretKeyRef" in source:
        # On one machine a token may simply be in the environment of the person who runs it.
        if source["secretKeyRef"]["name"] not in machine.secrets and machine.host_environment.get(entry["name"]):
            return machine.host_environment[entry["name"]]
        return _referred(source["secretKeyRef"], machine.secrets, "Secret")
    return _referred(source["configMapKeyRef"], machine.config_maps, "ConfigMap")


def _referred(reference: Object, objects: Mapping[str, Mapping[str, str]], kind: str) -> str:
    name, key = reference["name"], reference["key"]
    if name not in objects:
        raise ReferenceMissing(f'{kind.lower()} "{name}" not found')
    if key not in objects[name]:
        raise ReferenceMissing(f"couldn't find key {key} in {kind} default/{name}")
    return objects[name][key]


def _referred_all(source: Object, machine: Machine) -> dict[str, str]:
    """Every value of the Secret or ConfigMap that an entry of `envFrom` names."""
    kind, objects = ("Secret", machine.secrets) if "secretRef" in source else ("ConfigMap", machine.config_maps)
    reference = source["secretRef" if kind == "Secret" else "configMapRef"]
    if reference["name"] not in objects:
        if reference.get("optional"):
            return {}
        raise ReferenceMissing(f'{kind.lower()} "{reference["name"]}" not found')
    return {f"{source.get('prefix', '')}{key}": value for key, value in objects[reference["name"]].items()}


def plain_values(document: Object) -> dict[str, str]:
    """The values of a Secret or ConfigMap manifest by key."""
    data = document.get("data") or {}
    if document["kind"] == "Secret":
        data = {key: base64.b64decode(value).decode() for key, value in data.items()}
    return {**data, **(document.get("stringData") or {})}
