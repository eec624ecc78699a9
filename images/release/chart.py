"""The chart of a release: it names both images by their digests, and is pushed as an OCI artifact.

Invariants: the sources of the chart are not changed; what is pushed renders with no value set but what a user must set.
Knows nothing of how the images came to be.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from images.release.registry import Registry, ReleaseError

CHART = Path(__file__).resolve().parents[2] / "charts" / "stoker"


def version() -> str:
    """The chart's, which is the images' tag as well. Raises ReleaseError."""
    found = re.search(r"^appVersion: (\S+)$", (CHART / "Chart.yaml").read_text(), re.MULTILINE)
    if found is None:
        raise ReleaseError(f"{CHART / 'Chart.yaml'} has no appVersion")
    return found[1]


def pinned(values: str, place: str, operator: str, runtime: str) -> str:
    """The text of values.yaml, with images by digest. Raises ReleaseError where it has not the lines that it must."""
    for pattern, line in (
        (r"(?m)^(image:(?:\n  .*)*?\n  )repository: \S+", rf"\g<1>repository: {place}/operator"),
        (r"(?m)^(image:(?:\n  .*)*?\n  )digest: \S+", rf"\g<1>digest: {operator}"),
        (r"(?m)^(runtime:(?:\n  .*)*?\n  )image: \S+", rf"\g<1>image: {place}/runtime@{runtime}"),
    ):
        values, changed = re.subn(pattern, line, values, count=1)
        if not changed:
            raise ReleaseError(f"values.yaml has no line for {pattern.rpartition(')')[2]}")
    return values


def push_chart(helm: str, registry: Registry, operator: str, runtime: str) -> str:
    """Package and push it; its address. `operator` and `runtime` are digests. Raises ReleaseError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "stoker"
        shutil.copytree(CHART, folder)
        values = folder / "values.yaml"
        values.write_text(pinned(values.read_text(), registry.place, operator, runtime))
        _helm(helm, "lint", "--quiet", str(folder))
        _helm(helm, "package", str(folder), f"--destination={name}")
        [package] = Path(name).glob("*.tgz")
        _helm(
            helm, "push", str(package), f"oci://{registry.place}/charts", *(["--plain-http"] if registry.plain else [])
        )
    return f"oci://{registry.place}/charts/stoker"


def _helm(helm: str, *words: str) -> None:
    done = subprocess.run([helm, *words], capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"helm {' '.join(words)}: {(done.stderr or done.stdout).strip()[-1000:]}")
