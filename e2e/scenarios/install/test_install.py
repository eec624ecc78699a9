"""Scenario 1: install, apply, fetch, ready, a streamed chat, scale, upgrade, delete, uninstall; the texts on the way.

The terminal session of which README.md shows the beginning is the golden file `session.txt` of this scenario.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cluster.backend import Given
from e2e.cluster.binaries import ensure
from e2e.cluster.layout import HERE
from e2e.scenarios import golden, stoker
from e2e.scenarios.install import schemas
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.session import Session
from openai import OpenAI, omit

GOLDEN = Path(__file__).parent / "golden"
# Who a container is, whether its root is read-only, and which of what it should not have it has.
LOOK = """
import importlib.util, os, shutil
tools = [name for name in ('cc', 'gcc', 'g++', 'clang', 'nvcc') if shutil.which(name)]
packages = [name for name in {packages} if importlib.util.find_spec(name)]
print(os.getuid(), bool(os.statvfs('/').f_flag & os.ST_RDONLY), tools + packages)
"""
CHART = str(stoker.CHART)
IMAGES = "--set=image.repository=registry.example/operator,runtime.image=registry.example/engine:1"


@pytest.fixture
def demo(kube: Kube) -> Iterator[Kube]:
    """A namespace for the session; whatever happens, the release and the CRD are gone at the end."""
    with stoker.namespace(kube, "demo") as made:
        try:
            yield made
        finally:
            stoker.uninstall(kube)


def test_chart_is_valid(kube: Kube, tmp_path: Path) -> None:
    kube.helm("lint", "--strict", CHART)
    rendered = tmp_path / "chart.yaml"
    rendered.write_text(kube.helm("template", "stoker", CHART, "--set=crds.install=false", IMAGES))
    folder = tmp_path / "schemas"
    folder.mkdir()
    schemas.write(folder, json.loads(kube.kubectl("get", "--raw", "/openapi/v2")))
    kubeconform = str(ensure(["kubeconform"])["kubeconform"])
    command = [kubeconform, "-strict", "-summary", f"-schema-location={folder}/{schemas.LOCATION}", str(rendered)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "Invalid: 0, Errors: 0, Skipped: 0" in done.stdout
    rendered.write_text(rendered.read_text().replace("replicas: 2", "replicaz: 2"))
    assert subprocess.run(command, capture_output=True).returncode != 0, "kubeconform let a typo pass"


@pytest.mark.parametrize("typo", ["image.tagg=1", "hub.endpiont=http://hub", "replicas=two"])
def test_a_typo_in_the_values_is_refused(kube: Kube, typo: str) -> None:
    with pytest.raises(AssertionError, match=typo.split("=")[0].split(".")[-1]):
        kube.helm("template", "stoker", CHART, IMAGES, f"--set={typo}")


@pytest.mark.ci
def test_session(demo: Kube, hub: stoker.Hub, given: Given, tmp_path: Path) -> None:
    """The whole life of one service, in the words that a person reads."""
    session = Session(demo, tmp_path)
    images = (
        f"--set image.repository={given.images.operator.rpartition(':')[0]} --set runtime.image={given.images.runtime}"
    )
    session.run(
        "helm install stoker charts/stoker --namespace stoker-system --create-namespace --wait \\\n"
        "    --set image.repository=$REGISTRY/stoker-operator --set runtime.image=$REGISTRY/stoker-runtime:0.1.0",
        hidden=f"--set hub.endpoint={hub.endpoint} {images} -o json >/dev/null",
    )
    hub.faults(bytes_per_second=8_000_000)
    session.run("kubectl apply -f crds/examples/smollm2-cpu.yaml")
    eventually("it is fetched", lambda: " s to go" in _ready(demo)["message"], 120, every=0.2)
    golden.check(GOLDEN / "fetching.txt", golden.situation(demo, "smollm2"))
    hub.faults()
    eventually("a pod loads", lambda: _loads(demo), 120, every=0.1)
    golden.check(GOLDEN / "rolling-out.txt", golden.situation(demo, "smollm2"))
    session.run("kubectl wait --for=condition=Ready infsvc/smollm2 --timeout=10m")
    session.run("kubectl get infsvc")
    answer = _chat(stoker.url(demo, "smollm2"))
    assert "Paris" in answer, answer
    _look_inside(demo)
    golden.check(GOLDEN / "wide.txt", demo.kubectl("get", "infsvc", "-o", "wide"))
    described = demo.kubectl("describe", "infsvc", "smollm2")
    golden.check(GOLDEN / "describe.txt", described.partition("\nEvents:")[0])
    golden.check(GOLDEN / "events.txt", _events(demo))

    session.run('kubectl patch infsvc/smollm2 --type=merge -p \'{"spec": {"resources": {"cpu": "100m"}}}\'')
    stoker.wait_ready(demo, "smollm2")
    session.run("kubectl scale infsvc/smollm2 --replicas=2")
    session.run("kubectl wait --for=jsonpath='{.status.readyReplicas}'=2 infsvc/smollm2 --timeout=5m")
    stoker.wait_ready(demo, "smollm2")
    session.run("kubectl get infsvc")
    before = _pods(demo)
    session.run(
        "helm upgrade stoker charts/stoker --namespace stoker-system --reuse-values --set operator.workers=8 --wait",
        hidden="-o json >/dev/null",
    )
    assert _pods(demo) == before, "an upgrade of the operator restarted pods that serve"
    stoker.ask(stoker.url(demo, "smollm2"), "smollm2")
    session.run("kubectl delete infsvc/smollm2")
    _wait_empty(demo)
    session.run("helm uninstall stoker --namespace stoker-system --wait", hidden=">/dev/null")
    assert demo.kubectl("get", stoker.CRD, "-o", "name").strip(), (
        "an uninstall removed the CRD, and all services with it"
    )
    (HERE / "run" / "session.txt").write_text(session.text)
    golden.check(GOLDEN / "session.txt", session.text)


def _ready(kube: Kube) -> dict[str, str]:
    return stoker.conditions(kube, "smollm2").get("Ready", {"reason": "", "message": ""})


def _loads(kube: Kube) -> bool:
    """Whether the rollout waits for a pod that has a node, and for nothing else."""
    scheduled = stoker.conditions(kube, "smollm2").get("Scheduled", {})
    return scheduled.get("status") == "True" and "of 1 pods" in _ready(kube)["message"]


def _chat(base: str) -> str:
    client = OpenAI(base_url=f"{base}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Name the capital of France."}],
        max_tokens=40,
        temperature=0,
        stream=True,
        # An API server on the way would take the key for a token of its own.
        extra_headers={"Authorization": omit},
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(pieces) > 3, "the answer came in one piece"
    return "".join(pieces)


def _look_inside(kube: Kube) -> None:
    """Both images run as nobody, on a root that nobody can write to, without what the pod has no use for."""
    (pod,) = stoker.engine_pods(kube, "smollm2")
    engine = kube.run_in(pod["metadata"]["name"], LOOK.format(packages=("stoker_operator",)))
    assert engine.strip() == "65532 True []"
    python = ("exec", "deployment/stoker", "--", "/opt/stoker/bin/python", "-c")
    packages = ("torch", "stoker_runtime", "stoker_kernels", "pip")
    operator = kube.within(stoker.SYSTEM).kubectl(*python, LOOK.format(packages=packages))
    assert operator.strip() == "65532 True []"


def _events(kube: Kube) -> str:
    """(type, reason, message) of the service's own events, sorted: events of one second have no order."""
    items = kube.items("events")
    own = [item for item in items if item["involvedObject"]["kind"] == "InferenceService"]
    lines = {f"{item['type']} {item['reason']}: {item['message']}" for item in own}
    return "\n".join(sorted({golden.normalized(line).strip() for line in lines}))


def _pods(kube: Kube) -> list[tuple[str, int]]:
    pods = stoker.engine_pods(kube, "smollm2")
    return sorted((pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]) for pod in pods)


def _wait_empty(kube: Kube) -> None:
    kinds = "pods,jobs,deployments,services,persistentvolumeclaims,poddisruptionbudgets,networkpolicies"
    eventually("nothing is left of the service", lambda: not kube.items(kinds), 120)
