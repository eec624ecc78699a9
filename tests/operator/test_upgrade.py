"""`helm upgrade` from charts before: what was stored by their CRDs is served, read and written by the next one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.spec.service import parse

HERE = Path(__file__).parent / "upgrade"
CHART = Path(__file__).resolve().parents[2] / "charts" / "stoker"
CRD = "stoker.dev_inferenceservices.yaml"
Object = dict[str, Any]
# The CRDs that were: the first one of a chart, and that of replicas over several nodes.
FIRST, GROUPS = "first", "groups"
# Of which the operator says in its status what is wrong.
BROKEN = {FIRST: "old-3"}
# No spec of ours says what Kubernetes' own PodSpec has.
FOREIGN = ("podTemplate.spec",)
Run = Callable[..., str]


def objects(name: str) -> list[Object]:
    found: list[Object] = yaml.safe_load((HERE / f"{name}-objects.yaml").read_text())
    return found


def fields(name: str) -> set[str]:
    """The fields of spec that a CRD had, but those that it had only to refuse them."""
    crd = yaml.safe_load((HERE / f"{name}-crd.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return set(_named(spec, ""))


def _named(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    inside = schema["items"] if schema.get("type") == "array" else schema
    for name, each in inside.get("properties", {}).items():
        refused = any(rule["rule"] == "false" for rule in each.get("x-kubernetes-validations", ()))
        if not refused and f"{path}{name}" not in FOREIGN:
            yield f"{path}{name}"
            yield from _named(each, f"{path}{name}.")


def said(value: Any, path: str = "") -> Iterator[str]:
    """The fields that a stored spec has."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield f"{path}{key}"
            yield from said(each, f"{path}{key}.")
    for each in value if isinstance(value, list) else ():
        yield from said(each, path)


def test_what_is_stored_has_every_field_that_there_was() -> None:
    first = {path for spec in objects(FIRST) for path in said(spec)}
    later = {path for spec in objects(GROUPS) for path in said(spec)}
    assert sorted(fields(FIRST) - first) == []
    assert sorted(fields(GROUPS) - fields(FIRST) - later) == []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run helm or kubectl against an API server of this test's own, in which nothing of Stoker is."""
    from e2e.cluster import apiserver
    from e2e.cluster.binaries import ensure

    monkeypatch.delenv("KUBECONFIG", raising=False)
    binaries = ensure(["helm", "kubectl"])
    running = apiserver.start(tmp_path / "control-plane")
    environment = os.environ | {"KUBECONFIG": str(running.kubeconfig), "HOME": str(tmp_path)}

    def command(program: str, *words: str, stdin: str = "") -> str:
        line = [str(binaries[program]), *words]
        done = subprocess.run(line, env=environment, input=stdin, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    yield command
    running.stop()


@pytest.mark.apiserver
@pytest.mark.parametrize("name", [FIRST, GROUPS])
def test_what_was_stored_before_is_served_read_and_written(run: Run, tmp_path: Path, name: str) -> None:
    before = tmp_path / "before"
    shutil.copytree(CHART, before)
    shutil.copy(HERE / f"{name}-crd.yaml", before / "files" / CRD)
    values = "--set=image.repository=r/o,runtime.image=r/e:1,metricsAdapter.mode=Off"
    run("helm", "install", "stoker", str(before), values, "--set=admission.engineFlags=false")
    run("kubectl", "wait", "--for=condition=Established", "--timeout=60s", "crd/inferenceservices.stoker.dev")
    for index, spec in enumerate(objects(name)):
        head = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": f"old-{index}"}}
        run("kubectl", "create", "--validate=strict", "-f", "-", stdin=json.dumps(head | {"spec": spec}))

    def stored() -> dict[str, Object]:
        items = json.loads(run("kubectl", "get", "infsvc", "-o", "json"))["items"]
        return {item["metadata"]["name"]: item for item in items}

    old = stored()
    run("helm", "upgrade", "stoker", str(CHART), values)
    crd = json.loads(run("kubectl", "get", "crd", "inferenceservices.stoker.dev", "-o", "json"))
    assert crd["status"]["storedVersions"] == ["v1alpha1"]
    written = yaml.safe_load((CHART / "files" / CRD).read_text())["spec"]["versions"]
    assert crd["spec"]["versions"][0]["schema"] == written[0]["schema"], "the next CRD it is"
    new = stored()
    assert new.keys() == old.keys()
    for each, item in new.items():
        assert kept(old[each]["spec"], item["spec"])
        if each != BROKEN.get(name):
            parse(item)
        run("kubectl", "annotate", f"infsvc/{each}", "looked=at")
        run("kubectl", "patch", f"infsvc/{each}", "--type=merge", "-p", '{"spec": {"suspend": true}}')
        status = json.dumps({"status": {"replicas": 0, "observedGeneration": 1}})
        run("kubectl", "patch", f"infsvc/{each}", "--subresource=status", "--type=merge", "-p", status)


def kept(before: Any, after: Any) -> bool:
    """Whether everything that was there is there; the next CRD may add defaults."""
    if isinstance(before, dict):
        return isinstance(after, dict) and all(kept(value, after.get(key)) for key, value in before.items())
    return bool(before == after)
