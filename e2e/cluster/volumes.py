#!/usr/bin/env python3
"""Gives each claim of the node's storage classes a folder as its volume, and takes it away with the claim.

    python e2e/cluster/volumes.py --kubeconfig FILE --folder FOLDER --node NAME

A class with the parameter `limited` gets a file system of exactly the claim's size, in memory: for scenarios in which
a volume is full.

Invariants: level-triggered, it looks at all claims and volumes twice a second and may be restarted at any time;
only volumes that carry its own annotation are removed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config

PROVISIONER = "stoker.local/folder"
_MADE_BY = "pv.kubernetes.io/provisioned-by"
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class Provisioner:
    """The control loop."""

    def __init__(self, folder: Path, node: str) -> None:
        self._folder, self._node = folder, node
        self._core: Any = client.CoreV1Api()
        self._storage: Any = client.StorageV1Api()

    def look(self) -> None:
        """Serve every claim that waits; remove every volume whose claim is gone."""
        classes = {item.metadata.name: item for item in self._storage.list_storage_class().items}
        ours = {name: item for name, item in classes.items() if item.provisioner == PROVISIONER}
        for claim in self._core.list_persistent_volume_claim_for_all_namespaces().items:
            kind = ours.get(claim.spec.storage_class_name)
            if kind is not None and claim.status.phase == "Pending" and not claim.spec.volume_name:
                self._make(claim, limited=(kind.parameters or {}).get("limited") == "true")
        for volume in self._core.list_persistent_volume().items:
            made_by = (volume.metadata.annotations or {}).get(_MADE_BY)
            if made_by == PROVISIONER and volume.status.phase == "Released":
                self._remove(volume.metadata.name)

    def _make(self, claim: Any, *, limited: bool) -> None:
        name = f"pvc-{claim.metadata.uid}"
        place = self._folder / name
        size = claim.spec.resources.requests["storage"]
        if not place.exists():
            place.mkdir(parents=True)
            if limited:
                command = ["mount", "-t", "tmpfs", "-o", f"size={_bytes(size)},mode=0777", "tmpfs", str(place)]
                subprocess.run(command, check=True)
            place.chmod(0o777)
        here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [self._node]}
        volume = {
            "metadata": {"name": name, "annotations": {_MADE_BY: PROVISIONER}},
            "spec": {
                "capacity": {"storage": size},
                "accessModes": claim.spec.access_modes,
                "storageClassName": claim.spec.storage_class_name,
                "persistentVolumeReclaimPolicy": "Delete",
                "claimRef": {"namespace": claim.metadata.namespace, "name": claim.metadata.name,
                             "uid": claim.metadata.uid, "apiVersion": "v1", "kind": "PersistentVolumeClaim"},
                "local": {"path": str(place)},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
            },
        }  # fmt: skip
        try:
            self._core.create_persistent_volume(volume)
        except client.ApiException as error:
            if error.status != 409:  # made in the last look, not bound yet
                raise

    def _remove(self, name: str) -> None:
        place = self._folder / name
        subprocess.run(["umount", str(place)], capture_output=True)
        shutil.rmtree(place, ignore_errors=True)
        self._core.delete_persistent_volume(name)


def _bytes(quantity: str) -> int:
    for suffix, factor in _UNITS.items():
        if quantity.endswith(suffix):
            return int(float(quantity.removesuffix(suffix)) * factor)
    return int(quantity)


def main() -> int:
    """Look twice a second until terminated."""
    parser = argparse.ArgumentParser(description="A folder for each volume claim.")
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--node", required=True)
    options = parser.parse_args()
    load: Any = config.load_kube_config
    load(options.kubeconfig)
    provisioner = Provisioner(options.folder, options.node)
    while True:
        try:
            provisioner.look()
        except (client.ApiException, urllib3.exceptions.HTTPError) as error:
            # The API server restarts in some scenarios; the next look sees all that this one missed.
            print(f"volumes: {error}", file=sys.stderr, flush=True)
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
