"""Publish a release: `python -m images.release --registry registry.example.com/stoker` (`make release REGISTRY=…`).

    1. images are built, or taken from --archives      3. the list of each image's parts, as CycloneDX, belongs to it
    2. pushed; several platforms have one name         4. the chart names them by digest, and is pushed, too

The operator is built for every one of --platforms, the runtime for linux/amd64. Another platform than this machine's
needs a builder that runs it: an emulator in the kernel (binfmt_misc), or a docker context of such a machine. What the
operator installs is wheels, and images/operator.lock has one of each for both.

Invariants: nothing is pushed before all images are there; what is printed last is what to install.
Knows nothing of the images' insides but their lists of packages.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from e2e.cluster.binaries import BuildError, ensure
from images.release.archive import Contents, read_archive
from images.release.chart import push_chart, version
from images.release.registry import Registry, ReleaseError
from images.release.sbom import MEDIA_TYPE, sbom

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("operator", "runtime")


def build(name: str, platform: str, tag: str, archive: Path) -> None:
    """Build an image of images/ for a platform. Raises ReleaseError."""
    built = f"stoker/{name}:{tag}"
    file = f"--file={ROOT / 'images' / f'{name}.Dockerfile'}"
    _docker("build", file, f"--platform={platform}", f"--build-arg=VERSION={tag}", f"--tag={built}", str(ROOT))
    _docker("save", f"--output={archive}", built)


def _docker(*words: str) -> None:
    try:
        done = subprocess.run(["docker", *words], stdout=sys.stderr)
    except FileNotFoundError:
        raise ReleaseError("docker is missing; --archives DIR takes images that were built elsewhere") from None
    if done.returncode:
        raise ReleaseError(f"docker {words[0]} ended with status {done.returncode}")


def by_platform(name: str, archives: Iterable[Path]) -> dict[str, tuple[Path, Contents]]:
    """The archives of an image, with what they hold. Raises ReleaseError where two are of one platform."""
    read: dict[str, tuple[Path, Contents]] = {}
    for archive in archives:
        contents = read_archive(archive)
        if contents.platform in read:
            raise ReleaseError(f"{archive} is a second image of {name} for {contents.platform}")
        read[contents.platform] = (archive, contents)
    return read


def publish(registry: Registry, name: str, tag: str, images: Mapping[str, tuple[Path, Contents]]) -> str:
    """Push an image of one platform or several, with the list of its parts; the digest of what the tag stands for.

    Raises ReleaseError.
    """
    pushed: list[str] = []
    for platform, (archive, contents) in images.items():
        digest = registry.push(archive, f"{name}:{tag}-{platform.replace('/', '-')}")
        registry.attach(name, digest, MEDIA_TYPE, sbom(f"{registry.place}/{name}", tag, digest, contents))
        _say(f"{name}@{digest}  {platform}, {len(contents.packages)} packages in its list of parts")
        pushed.append(f"{name}@{digest}")
    return registry.join(pushed, f"{name}:{tag}")


def release(registry: Registry, helm: str, tag: str, archives: Mapping[str, Sequence[Path]]) -> str:
    """Publish everything; what to install. Raises ReleaseError."""
    images = {name: by_platform(name, archives[name]) for name in NAMES}
    operator, runtime = (publish(registry, name, tag, images[name]) for name in NAMES)
    chart = push_chart(helm, registry, operator, runtime)
    flags = " --plain-http" if registry.plain else ""
    return f"helm install stoker {chart} --version {tag} --namespace stoker-system --create-namespace{flags}"


def found(folder: Path) -> dict[str, list[Path]]:
    """The archives of a folder, by their images: operator*.tar, runtime*.tar. Raises ReleaseError."""
    archives = {name: sorted(folder.glob(f"{name}*.tar")) for name in NAMES}
    for name, files in archives.items():
        if not files:
            raise ReleaseError(f"{folder} has no {name}*.tar")
    return archives


def _say(text: str) -> None:
    sys.stderr.write(f"release: {text}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Build, if nothing is given, and publish."""
    parser = argparse.ArgumentParser(prog="python -m images.release", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--registry", required=True, metavar="HOST/PATH", help="where to; credentials are docker's")
    parser.add_argument("--plain-http", action="store_true", help="it speaks HTTP")
    parser.add_argument("--platforms", default="linux/amd64,linux/arm64", help="of the operator (default: %(default)s)")
    parser.add_argument(
        "--archives", type=Path, metavar="DIR", help="take operator*.tar and runtime*.tar; build nothing"
    )
    options = parser.parse_args(argv)
    try:
        tools, tag = ensure(["crane", "helm"]), version()
        registry = Registry(str(tools["crane"]), options.registry.strip("/"), options.plain_http)
        with tempfile.TemporaryDirectory() as folder:
            if options.archives is None:
                for name, platforms in (("operator", options.platforms.split(",")), ("runtime", ["linux/amd64"])):
                    for platform in platforms:
                        build(name, platform, tag, Path(folder) / f"{name}-{platform.replace('/', '-')}.tar")
            print(release(registry, str(tools["helm"]), tag, found(options.archives or Path(folder))))
    except (ReleaseError, BuildError, OSError, ValueError) as error:
        _say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
