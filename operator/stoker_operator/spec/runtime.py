"""The part of the spec that says how the engine runs.

Invariants: as in service.py: frozen, with the CRD's defaults and rules.
Knows nothing of the children an InferenceService gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker_operator.spec import engine_guard
from stoker_operator.spec.endpoint import DNS_NAME_PATTERN
from stoker_operator.spec.reader import Reader


@dataclass(frozen=True, slots=True)
class Runtime:
    """How the engine runs. `context_length` and `max_concurrency`: 0 = the engine decides."""

    image: str = ""
    args: tuple[str, ...] = ()
    env: tuple[Mapping[str, Any], ...] = ()
    env_from: tuple[Mapping[str, Any], ...] = ()
    context_length: int = 0
    max_concurrency: int = 0
    shm_size: str = "1Gi"


def read_runtime(r: Reader) -> Runtime:
    """spec.runtime."""
    env = r.objects("env", most=64)
    for index, entry in enumerate(env):
        item = Reader(entry, f"{r.path}.env[{index}]", r.problems)
        item.text("name", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", longest=128, required=True)
        if ("value" in entry) == ("valueFrom" in entry):
            r.problems.append(f"{item.path}: give exactly one of value and valueFrom")
        item.text("value", longest=4096)
        source = item.mapping("valueFrom")
        for key in ("secretKeyRef", "configMapKeyRef"):
            source.mapping(key)
        source.finish()
        item.finish()
    env_from = r.objects("envFrom", most=16)
    for index, entry in enumerate(env_from):
        item = Reader(entry, f"{r.path}.envFrom[{index}]", r.problems)
        item.text("prefix", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$", longest=128)
        if ("secretRef" in entry) == ("configMapRef" in entry):
            r.problems.append(f"{item.path}: give exactly one of secretRef and configMapRef")
        for key in ("secretRef", "configMapRef"):
            source = item.mapping(key)
            source.text("name", pattern=DNS_NAME_PATTERN, longest=253, required=key in entry)
            source.boolean("optional")
            source.finish()
        item.finish()
    runtime = Runtime(
        image=r.text("image", longest=512),
        args=r.texts("args", most=64, longest=1024),
        env=env,
        env_from=env_from,
        context_length=r.integer("contextLength", least=0, most=16777216),
        max_concurrency=r.integer("maxConcurrency", least=0, most=65536),
        shm_size=r.quantity("shmSize", default="1Gi"),
    )
    refused = engine_guard.problems(runtime.args, env, own_image=bool(runtime.image))
    r.problems.extend(text.replace("spec.runtime", r.path, 1) for text in refused)
    r.finish()
    return runtime
