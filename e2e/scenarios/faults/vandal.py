"""Programs that change the bytes of a cache, run in a pod that mounts a model's volume for writing."""

from __future__ import annotations

from e2e.scenarios.kube import Kube

FLIP = """
import glob
for path in glob.glob('/models/sha256-*/*.gguf'):
    with open(path, 'r+b') as stream:
        stream.seek(1 << 20)
        byte = stream.read(1)
        stream.seek(1 << 20)
        stream.write(bytes([byte[0] ^ 1]))
"""
# As a disk forgets: neither the size nor any time that a program can set tells of it.
ROT = f"""
import glob, os
before = {{path: os.stat(path) for path in glob.glob('/models/sha256-*/*.gguf')}}
{FLIP}
for path, stat in before.items():
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
"""


def run_with_volume(kube: Kube, image: str, script: str) -> None:
    """Run a Python program in a pod that mounts the model's volume for writing."""
    (claim,) = kube.items("persistentvolumeclaims")
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "vandal"},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "runAsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}],
            "containers": [
                {
                    "name": "vandal",
                    "image": image,
                    "command": ["/opt/stoker/bin/python", "-c", script],
                    "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                    "securityContext": security,
                }
            ],
        },
    }
    kube.apply(pod)
    kube.wait("jsonpath={.status.phase}=Succeeded", "pod/vandal", 60)
    kube.kubectl("delete", "pod/vandal")
