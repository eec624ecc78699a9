"""What containerd, CNI, the kubelet and kube-proxy are configured with.

Pure apart from writing the files. Each setting that is not plain has its reason beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e.cluster.layout import (
    DNS_ADDRESS,
    NODE_ADDRESS,
    NODE_NAME,
    PAUSE_IMAGE,
    POD_BRIDGE,
    POD_NETWORK,
    POD_SUBNET,
    Layout,
)

_UNUSED = ("blockfile", "btrfs", "devmapper", "erofs", "native", "zfs")


def write(layout: Layout, *, runc: str, cni: Path) -> None:
    """Write all configuration files. `cni` is the folder of the network plugins."""
    (layout.config / "cni").mkdir(parents=True, exist_ok=True)
    (layout.config / "containerd.toml").write_text(_containerd(layout, runc, cni))
    for name, document in (
        ("cni/10-pods.conflist", _cni(layout)),
        ("kubelet.json", _kubelet(layout)),
        ("kube-proxy.json", _kube_proxy(layout)),
    ):
        (layout.config / name).write_text(json.dumps(document, indent=1))
    (layout.config / "resolv.conf").write_text(f"nameserver {DNS_ADDRESS}\n")


def base_spec(plain: dict[str, Any], mounts: dict[Path, str]) -> dict[str, Any]:
    """The OCI spec every container starts from: containerd's own, and read-only folders of this machine."""
    bound = [
        {"destination": target, "type": "bind", "source": str(source), "options": ["rbind", "ro", "nosuid", "nodev"]}
        for source, target in mounts.items()
    ]
    return plain | {"mounts": [*plain["mounts"], *bound]}


def _containerd(layout: Layout, runc: str, cni: Path) -> str:
    disabled = [f"io.containerd.snapshotter.v1.{name}" for name in _UNUSED]
    disabled += ["io.containerd.tracing.processor.v1.otlp", "io.containerd.nri.v1.nri"]
    runtime = "plugins.'io.containerd.cri.v1.runtime'"
    return f"""version = 3
root = '{layout.data / "containerd"}'
state = '{layout.run / "containerd"}'
disabled_plugins = {json.dumps(disabled)}
[grpc]
  address = '{layout.containerd}'
[ttrpc]
  address = '{layout.containerd}.ttrpc'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = '{PAUSE_IMAGE}'
[plugins.'io.containerd.grpc.v1.cri']
  stream_server_address = '127.0.0.1'
  stream_server_port = '0'
[{runtime}]
  # Without CAP_SYS_RESOURCE a score cannot be lowered, and pods would not start.
  restrict_oom_score_adj = true
  # So that taking the node down finds them all below one folder.
  netns_mounts_under_state_dir = true
  cdi_spec_dirs = ['{layout.devices}']
[{runtime}.cni]
  bin_dirs = ['{cni}']
  conf_dir = '{layout.config / "cni"}'
[{runtime}.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
  base_runtime_spec = '{layout.config / "base-spec.json"}'
[{runtime}.containerd.runtimes.runc.options]
  BinaryName = '{runc}'
  Root = '{layout.run / "runc"}'
  SystemdCgroup = false
"""


def _cni(layout: Layout) -> dict[str, Any]:
    ranges = [[{"subnet": POD_SUBNET}]]
    bridge = {
        "type": "bridge",
        "bridge": POD_BRIDGE,
        "isDefaultGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "dataDir": str(layout.data / "cni"), "ranges": ranges},
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, portmap]}


def _kubelet(layout: Layout) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_ADDRESS,
        "healthzBindAddress": "127.0.0.1",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.keys / "kubelet-ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        # Only where the machine has nothing newer.
        "failCgroupV1": False,
        "failSwapOn": False,
        # Lowering it takes CAP_SYS_RESOURCE.
        "oomScoreAdj": 0,
        "makeIPTablesUtilChains": False,
        "containerRuntimeEndpoint": f"unix://{layout.containerd}",
        "podLogsDir": str(layout.data / "pod-logs"),
        "volumePluginDir": str(layout.data / "volume-plugins"),
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": str(layout.config / "resolv.conf"),
        # The disk is shared with whatever else this machine does: pods are not evicted for that.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        # Images are imported, no registry has them: one that is collected would be gone.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "5s",
        # How soon a pod sees what became of its Secrets: a minute otherwise.
        "syncFrequency": "10s",
    }


def _kube_proxy(layout: Layout) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(layout.kubeconfig("kube-proxy"))},
        "mode": "nftables",
        "oomScoreAdj": 0,
        "bindAddress": NODE_ADDRESS,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "hostnameOverride": NODE_NAME,
        "clusterCIDR": POD_NETWORK,
        "detectLocalMode": "ClusterCIDR",
        "nodePortAddresses": [f"{NODE_ADDRESS}/32"],
        # The machine's connection table is not ours to size.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"},
    }
