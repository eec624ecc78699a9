"""node_cache/agent.py against a real API server, with the rights and within the policy of the chart."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.node_cache.test_disk import publish

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.manifests import copies
from stoker_operator.manifests.identity import COMPONENT, MANAGED_BY, SOURCE_LABEL
from stoker_operator.node_cache.agent import Agent
from stoker_operator.node_cache.disk import Disk
from stoker_operator.node_cache.settings import from_arguments
from stoker_operator.node_cache.wishes import mine

pytestmark = pytest.mark.apiserver
CHART = Path(__file__).resolve().parents[3] / "charts" / "stoker"
WIDE = (
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
    "StorageClass",
)
KIB = 1024
Object = dict[str, Any]


class Place:
    """One node, its agent with the chart's rights alone, and what pods would ask of it."""

    def __init__(
        self, cluster: Cluster, restricted: Cluster, agent: Agent, disk: Disk, node: Object, folder: str
    ) -> None:
        self.cluster, self.restricted, self.agent, self.disk = cluster, restricted, agent, disk
        self.node, self.folder = node, folder

    async def claim(self, component: str, size: str, *, digest: str = "", source: str = "") -> Object:
        namespace = self.folder.partition(".")[0]
        notes = {copies.SELECTED_NODE: self.node["metadata"]["name"], copies.DIGEST: digest, SOURCE_LABEL: source}
        meta: Object = {
            "name": f"pod-{uuid.uuid4().hex[:8]}",
            "namespace": namespace,
            "labels": {MANAGED_BY: "stoker", COMPONENT: component},
            "annotations": {key: value for key, value in notes.items() if value},
        }
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": size}},
            "storageClassName": "copies",
        }
        manifest = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}
        pod = await self._pod(str(meta["name"]), namespace)
        owner = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": pod["metadata"]["uid"]}
        meta["ownerReferences"] = [owner]
        return await self.cluster.create(kinds.CLAIM, manifest)

    async def _pod(self, name: str, namespace: str) -> Object:
        spec = {"schedulerName": "nobody", "containers": [{"name": "fetch", "image": "i"}]}
        head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace}}
        return await self.cluster.create(kinds.POD, head | {"spec": spec})

    async def ends(self, claim: Object, phase: str) -> None:
        """The pod of a claim is over, and stays with its Job."""
        meta = claim["metadata"]
        head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": meta["name"], "namespace": meta["namespace"]}}
        await self.cluster.apply(kinds.POD, head | {"status": {"phase": phase}}, "status", "kubelet")

    async def volumes(self) -> dict[str, Object]:
        """Those that are not being ended, by the names of their claims."""
        found = await self.cluster.list_all(kinds.VOLUME, "", mine(self.node["metadata"]["name"]))
        return {item["spec"]["claimRef"]["name"]: item for item in found if "deletionTimestamp" not in item["metadata"]}

    async def words(self, claim: Object) -> str:
        found = await self.cluster.get(kinds.CLAIM, claim["metadata"]["namespace"], claim["metadata"]["name"])
        return str((found or claim)["metadata"]["annotations"].get(copies.FULL, ""))

    async def end(self, claim: Object) -> None:
        """As when its pod is gone."""
        meta = claim["metadata"]
        await self.cluster.merge(kinds.CLAIM, meta["namespace"], meta["name"], {"metadata": {"finalizers": None}})
        await self.cluster.delete(kinds.CLAIM, meta["namespace"], meta["name"], meta["uid"])

    async def copies(self) -> set[str]:
        found = await self.cluster.get(kinds.NODE, "", self.node["metadata"]["name"])
        assert found is not None
        return {key for key in found["metadata"]["labels"] if key.startswith(copies.COPY_PREFIX)}


@pytest.fixture
async def place(
    namespace: str, cluster: Cluster, control_plane: Path, kubectl: Callable[..., str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Place]:  # fmt: skip
    from e2e.cluster.binaries import ensure

    command = [str(ensure(["helm"])["helm"]), "template", "stoker", str(CHART), "--namespace", namespace]
    command += ["--set=image.repository=r/o,runtime.image=r/e:1,nodeCache.enabled=true,nodeCache.size=10Ki"]
    command += [
        f"--set=nodeCache.namespace={namespace},nodeCache.folder={tmp_path}/models,nodeCache.storageClassName=copies"
    ]
    chart = yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    ours = [item for item in chart if item and item["metadata"]["name"].endswith(("-node-cache", "copies"))]
    made = [item for item in ours if item["kind"] in (*WIDE, "ServiceAccount")]
    for item in made:
        kubectl("apply", "-f", "-", stdin=item)
    [agents] = [item for item in ours if item["kind"] == "DaemonSet"]
    config = yaml.safe_load(control_plane.read_text())
    config["users"][0]["user"] = {"token": kubectl("create", "token", "stoker-node-cache").strip()}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    restricted = await Cluster.connect()
    monkeypatch.setenv("KUBECONFIG", str(control_plane))
    name = f"node-{uuid.uuid4().hex[:8]}"
    labels = {"kubernetes.io/hostname": f"host-of-{name}", "zone": "a"}
    node = await cluster.apply(
        kinds.NODE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
    )
    arguments = agents["spec"]["template"]["spec"]["containers"][0]["args"]
    settings = from_arguments([item.replace("$(NODE_NAME)", name) for item in arguments[1:]], {})
    disk = Disk(Path(settings.folder), os.getgid())
    disk.prepare()
    agent = Agent(restricted, settings, disk)
    found = await cluster.get(kinds.NAMESPACE, "", namespace)
    assert found is not None
    yield Place(cluster, restricted, agent, disk, node, f"{namespace}.{found['metadata']['uid']}")
    await agent.stop()
    await restricted.close()
    kubectl("delete", "node", name)
    for item in await cluster.list_all(kinds.VOLUME, "", mine(name)):
        await cluster.merge(kinds.VOLUME, "", item["metadata"]["name"], {"metadata": {"finalizers": None}})
        await cluster.delete(kinds.VOLUME, "", item["metadata"]["name"], item["metadata"]["uid"])
    for item in made:
        if item["kind"] in WIDE:
            kubectl("delete", item["kind"], item["metadata"]["name"], "--ignore-not-found")


async def a_second() -> None:
    """Until another one: objects say no more of when they were made."""
    began = int(time.time())
    while int(time.time()) == began:
        await asyncio.sleep(0.05)


async def seen(place: Place, claim: Object, eventually: Callable[..., Any], *, gone: bool = False) -> None:
    """Look until the agent's watch has told it of a claim, or of its end, and it has answered."""

    async def look() -> bool:
        await place.agent.look()
        answered = claim["metadata"]["name"] in await place.volumes() or bool(await place.words(claim))
        return answered is not gone

    await eventually(look)


async def test_a_copy_is_brought_read_and_given_up(place: Place, eventually: Callable[..., Any]) -> None:
    digest = "sha256:" + "c0" * 32
    early = await place.claim(copies.READER, "4Ki", digest=digest)
    await place.agent.look()
    filler = await place.claim(copies.FILLER, "6Ki", source="one")
    await seen(place, filler, eventually)
    volumes = await place.volumes()
    assert set(volumes) == {filler["metadata"]["name"]}, "nobody reads what is not whole"
    spec = volumes[filler["metadata"]["name"]]["spec"]
    assert Path(spec["local"]["path"]).name == place.folder
    [term] = spec["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"]
    assert term["values"] == [f"host-of-{place.node['metadata']['name']}"]
    assert volumes[filler["metadata"]["name"]]["metadata"]["ownerReferences"][0]["uid"] == place.node["metadata"]["uid"]

    await place.ends(filler, "Failed")
    await a_second()
    again = await place.claim(copies.FILLER, "6Ki", source="one")
    await seen(place, again, eventually)
    assert again["metadata"]["name"] in await place.volumes(), "another try has the room of the first one"
    other = await place.claim(copies.FILLER, "5Ki", source="two")
    await seen(place, other, eventually)
    assert "are promised to other fetches" in await place.words(other)

    publish(Path(spec["local"]["path"]), digest, 3 * KIB)
    await seen(place, early, eventually)
    assert early["metadata"]["name"] in await place.volumes()
    await place.agent.look()
    assert await place.copies() == {copies.copy_label(place.folder.partition(".")[0], digest)}
    assert other["metadata"]["name"] not in await place.volumes(), "its fetch is not over"
    await place.ends(again, "Succeeded")
    await place.agent.look()
    assert other["metadata"]["name"] in await place.volumes(), "what was promised was brought, and was less"
    await place.ends(other, "Succeeded")
    fourth = await place.claim(copies.FILLER, "6Ki", source="four")
    await seen(place, fourth, eventually)
    assert fourth["metadata"]["name"] in await place.volumes(), "what brought nothing, all being there, has no room"

    large = await place.claim(copies.FILLER, "9Ki", source="three")
    for claim in (filler, again, other, fourth):
        await place.end(claim)
        await seen(place, claim, eventually, gone=True)
    await seen(place, large, eventually)
    assert "no room for 9.2 kB" in await place.words(large)
    assert place.disk.has(place.folder, digest), "a pod uses it"
    await place.end(early)

    async def served() -> bool:
        await place.agent.look()
        return large["metadata"]["name"] in await place.volumes()

    await eventually(served)
    assert not place.disk.has(place.folder, digest)
    await place.agent.look()
    assert await place.copies() == set()


async def test_an_agent_may_write_nothing_else(place: Place, eventually: Callable[..., Any]) -> None:
    claim = await place.claim(copies.FILLER, "1Ki", source="one")
    await seen(place, claim, eventually)
    [good] = (await place.volumes()).values()
    bare = {"apiVersion": "v1", "kind": "PersistentVolume", "spec": good["spec"]}
    root = bare["spec"]["local"]["path"].rpartition("/")[0]

    async def refused(path: str) -> str:
        meta = {"name": f"stray-{uuid.uuid4().hex[:8]}", "labels": good["metadata"]["labels"]}
        local = bare | {"metadata": meta, "spec": {**bare["spec"], "local": {"path": path}}}
        try:
            await place.restricted.apply(kinds.VOLUME, local)
        except ApiError as error:
            return error.message
        return ""

    async def guarded() -> bool:
        return bool(await refused("/etc"))  # the API server takes a policy up a moment after it is made

    await eventually(guarded)
    for path in ("/", root, f"{root}/a/b", f"{root}-other/a"):
        assert "own class and folder" in await refused(path), path
    name = place.node["metadata"]["name"]
    for change in ({"labels": {"zone": "b"}}, {"labels": {"zone": None}}, {"annotations": {"a": "b"}}):
        with pytest.raises(ApiError, match="labels on nodes alone"):
            await place.restricted.merge(kinds.NODE, "", name, {"metadata": change})
    with pytest.raises(ApiError, match="labels on nodes alone"):
        await place.restricted.merge(kinds.NODE, "", name, {"spec": {"unschedulable": True}})
    other = claim | {"metadata": {"name": "users-own", "namespace": claim["metadata"]["namespace"]}}
    other = other | {"spec": {**claim["spec"], "storageClassName": "fast"}}
    await place.cluster.create(kinds.CLAIM, other)
    with pytest.raises(ApiError, match="claims of its own class"):
        await place.restricted.merge(
            kinds.CLAIM, claim["metadata"]["namespace"], "users-own", {"metadata": {"labels": {"a": "b"}}}
        )
