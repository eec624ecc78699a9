"""`helm upgrade` from the chart before: what was stored by its CRD is served, read and written by the next one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.spec.service import parse

pytestmark = pytest.mark.apiserver
HERE = Path(__file__).parent / "upgrade"
CHART = Path(__file__).resolve().parents[2] / "charts" / "stoker"
CRD = "stoker.dev_inferenceservices.yaml"
STORED: list[dict[str, Any]] = yaml.safe_load((HERE / "objects.yaml").read_text())
# Of which the operator says in its status what is wrong.
BROKEN = "old-3"
Run = Callable[..., str]


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


def test_what_was_stored_before_is_served_read_and_written(run: Run, tmp_path: Path) -> None:
    before = tmp_path / "before"
    shutil.copytree(CHART, before)
    shutil.copy(HERE / "crd-before.yaml", before / "files" / CRD)
    values = "--set=image.repository=r/o,runtime.image=r/e:1,metricsAdapter.mode=Off"
    run("helm", "install", "stoker", str(before), values, "--set=admission.engineFlags=false")
    run("kubectl", "wait", "--for=condition=Established", "--timeout=60s", "crd/inferenceservices.stoker.dev")
    for index, spec in enumerate(STORED):
        head = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": f"old-{index}"}}
        run("kubectl", "create", "--validate=strict", "-f", "-", stdin=json.dumps(head | {"spec": spec}))

    def stored() -> dict[str, dict[str, Any]]:
        items = json.loads(run("kubectl", "get", "infsvc", "-o", "json"))["items"]
        return {item["metadata"]["name"]: item for item in items}

    old = stored()
    run("helm", "upgrade", "stoker", str(CHART), values)
    crd = json.loads(run("kubectl", "get", "crd", "inferenceservices.stoker.dev", "-o", "json"))
    assert crd["status"]["storedVersions"] == ["v1alpha1"]
    run("kubectl", "explain", "infsvc.spec.resources.claims")  # the next CRD it is
    new = stored()
    assert new.keys() == old.keys()
    for name, item in new.items():
        assert kept(old[name]["spec"], item["spec"])
        if name != BROKEN:
            parse(item)
        run("kubectl", "annotate", f"infsvc/{name}", "looked=at")
        run("kubectl", "patch", f"infsvc/{name}", "--type=merge", "-p", '{"spec": {"suspend": true}}')
        status = json.dumps({"status": {"replicas": 0, "observedGeneration": 1}})
        run("kubectl", "patch", f"infsvc/{name}", "--subresource=status", "--type=merge", "-p", status)


def kept(before: Any, after: Any) -> bool:
    """Whether everything that was there is there; the next CRD may add defaults."""
    if isinstance(before, dict):
        return isinstance(after, dict) and all(kept(value, after.get(key)) for key, value in before.items())
    return bool(before == after)
