"""`helm upgrade` from charts before: what was stored by their CRDs is served, read and written by the next one, and no
pod is another one for it; what they were installed with goes on, or is refused with the reason.

Two of them are whole, as they were: the first one that there was (commit 38e3e07b) and one of two days later
(21b06ff8). Of a third the CRD alone is kept, in today's chart.
"""

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

from stoker_operator.manifests import revision_template, template_key
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, parse

HERE = Path(__file__).parent / "upgrade"
CHART = Path(__file__).resolve().parents[2] / "charts" / "stoker"
CRD = "stoker.dev_inferenceservices.yaml"
Object = dict[str, Any]
# The charts that were, and the CRD of replicas over several nodes.
OLDEST, FIRST, GROUPS = "oldest", "first", "groups"
WHOLE = (OLDEST, FIRST)
# Of which the operator says in its status what is wrong.
BROKEN = {OLDEST: "old-3", FIRST: "old-3"}
# What a cluster without images and without nodes needs, of values that the chart had by then.
IMAGES = "--set=image.repository=r/o,runtime.image=r/e:1"
VALUES = {
    OLDEST: [IMAGES],
    FIRST: [f"{IMAGES},metricsAdapter.mode=Off"],
    GROUPS: [f"{IMAGES},metricsAdapter.mode=Off", "--set=admission.engineFlags=false"],
}
# No spec of ours says what Kubernetes' own PodSpec has.
FOREIGN = ("podTemplate.spec",)
Run = Callable[..., str]


def objects(name: str) -> list[Object]:
    found: list[Object] = yaml.safe_load((HERE / f"{name}-objects.yaml").read_text())
    return found


def crd_file(name: str) -> Path:
    return HERE / f"{name}-chart" / "files" / CRD if name in WHOLE else HERE / f"{name}-crd.yaml"


def chart(name: str, folder: Path) -> Path:
    """The chart that was; of a CRD that was, today's chart with it."""
    if name in WHOLE:
        return HERE / f"{name}-chart"
    shutil.copytree(CHART, folder)
    shutil.copy(crd_file(name), folder / "files" / CRD)
    return folder


def fields(name: str) -> set[str]:
    """The fields of spec that a CRD had, but those that it had only to refuse them."""
    crd = yaml.safe_load(crd_file(name).read_text())
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
    oldest = {path for spec in objects(OLDEST) for path in said(spec)}
    first = {path for spec in objects(FIRST) for path in said(spec)}
    assert sorted(fields(OLDEST) - oldest) == []
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
@pytest.mark.parametrize("name", [OLDEST, FIRST, GROUPS])
def test_what_was_stored_before_is_served_read_and_written(run: Run, tmp_path: Path, name: str) -> None:
    before = chart(name, tmp_path / "before")
    run("helm", "install", "stoker", str(before), *VALUES[name])
    run("kubectl", "wait", "--for=condition=Established", "--timeout=60s", "crd/inferenceservices.stoker.dev")
    for index, spec in enumerate(objects(name)):
        head = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": f"old-{index}"}}
        run("kubectl", "create", "--validate=strict", "-f", "-", stdin=json.dumps(head | {"spec": spec}))

    def stored() -> dict[str, Object]:
        items = json.loads(run("kubectl", "get", "infsvc", "-o", "json"))["items"]
        return {item["metadata"]["name"]: item for item in items}

    old = stored()
    # With all that the chart before let one set, at its values; the metrics API is its own test's.
    known = ["-f", str(before / "values.yaml")] if name in WHOLE else []
    run("helm", "upgrade", "stoker", str(CHART), *known, f"{IMAGES},metricsAdapter.mode=Off")
    crd = json.loads(run("kubectl", "get", "crd", "inferenceservices.stoker.dev", "-o", "json"))
    assert crd["status"]["storedVersions"] == ["v1alpha1"]
    written = yaml.safe_load((CHART / "files" / CRD).read_text())["spec"]["versions"]
    assert crd["spec"]["versions"][0]["schema"] == written[0]["schema"], "the next CRD it is"
    new = stored()
    assert new.keys() == old.keys()
    for each, item in new.items():
        assert kept(old[each]["spec"], item["spec"])
        assert unwritten(item) == unwritten(old[each]), "somebody wrote it, so a new generation would be rolled out"
        if each != BROKEN.get(name):
            assert pods(item) == pods(old[each]), "defaults of the next CRD make other pods of what was stored"
        run("kubectl", "annotate", f"infsvc/{each}", "looked=at")
        run("kubectl", "patch", f"infsvc/{each}", "--type=merge", "-p", '{"spec": {"suspend": true}}')
        status = json.dumps({"status": {"replicas": 0, "observedGeneration": 1}})
        run("kubectl", "patch", f"infsvc/{each}", "--subresource=status", "--type=merge", "-p", status)


def unwritten(item: Object) -> list[Any]:
    """What changes with each write of an object's spec."""
    return [item["metadata"][key] for key in ("uid", "generation", "resourceVersion")]


def pods(item: Object) -> str:
    """The pods that the operator makes of it, by their hash."""
    model = FetchedModel("c0ffee", "sha256:aa", 10**9, "sha256-aa", "sha256-aa")
    return template_key(revision_template(parse(item), Settings(), model))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (OLDEST, "runtime.image is empty: no registry serves Stoker's images"),  # it had a default for it
        (FIRST, "image.repository is empty: no registry serves Stoker's images"),  # as it said itself
    ],
)
def test_what_a_chart_was_installed_with_goes_on_or_is_refused_with_the_reason(name: str, why: str) -> None:
    from e2e.cluster.binaries import ensure

    helm, values = str(ensure(["helm"])["helm"]), HERE / f"{name}-chart" / "values.yaml"

    def render(*words: str) -> subprocess.CompletedProcess[str]:
        line = [helm, "template", "stoker", str(CHART), "-f", str(values), *words]
        return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)

    bare = render()
    assert bare.returncode != 0
    assert why in bare.stderr
    own = render(IMAGES, "--set=operator.workers=9,operator.leaseSeconds=31,watchNamespaces={a,b},hub.endpoint=http://h")
    assert own.returncode == 0, own.stderr
    deployments = [each for each in yaml.safe_load_all(own.stdout) if each and each["kind"] == "Deployment"]
    [operator] = [each for each in deployments if each["metadata"]["name"] == "stoker"]
    asked = {"--workers=9", "--lease-seconds=31", "--namespaces=a,b", "--hub-endpoint=http://h"}
    assert asked <= set(operator["spec"]["template"]["spec"]["containers"][0]["args"])


def kept(before: Any, after: Any) -> bool:
    """Whether everything that was there is there; the next CRD may add defaults."""
    if isinstance(before, dict):
        return isinstance(after, dict) and all(kept(value, after.get(key)) for key, value in before.items())
    return bool(before == after)
