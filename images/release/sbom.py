"""The list of an image's parts, as CycloneDX has it.

Invariants: pure; the same image gives the same text, so that it has the same digest.
Knows nothing of archives and registries.
"""

from __future__ import annotations

import json
from typing import Any

from images.release.archive import Contents, Package

MEDIA_TYPE = "application/vnd.cyclonedx+json"


def sbom(name: str, version: str, digest: str, contents: Contents) -> bytes:
    """The document about one image, whose manifest has this digest."""
    subject = {
        "type": "container",
        "bom-ref": digest,
        "name": name,
        "version": version,
        "properties": [{"name": "oci:platform", "value": contents.platform}],
        "hashes": [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}],
    }
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject},
        "components": [_component(package) for package in contents.packages],
    }
    return json.dumps(document, sort_keys=True, indent=1).encode()


def _component(package: Package) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": package.url,
        "name": package.name,
        "version": package.version,
        "purl": package.url,
    }
    # A name that is no expression of SPDX is a license's own.
    return found | ({"licenses": [{"license": {"name": package.license}}]} if package.license else {})
