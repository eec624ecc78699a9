"""`docker build` on this machine: by the daemon that is there, else by one of our own, for as long as it is needed.

A daemon of our own has no bridge and touches no firewall; builds use the machine's network. Where its base image can
be pulled from no registry, one of the same name is made with debootstrap: Debian's own Python of the same minor
version as the Python that runs this, so that its packages can be lent to containers.

Invariants: the machine's Docker, where there is one, gets images and nothing else; our own daemon's layers stay in
the cache folder, and nothing else of it stays.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster import remains
from e2e.cluster.binaries import Say, to_stderr
from e2e.cluster.debian import ensure_commands
from e2e.cluster.image_tar import write_root
from e2e.cluster.layout import Layout
from e2e.cluster.processes import Processes, StartError, uninterrupted

# Debian's release by the Python it brings.
RELEASES = {"3.11": "bookworm", "3.13": "trixie"}
MIRROR = "http://deb.debian.org/debian"
_PACKAGES = "python3,python3-pip,ca-certificates"
_UNUSED = ("usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists")
_SETTING = re.compile(r"^global\.([\w-]+)='(.*)'$", re.MULTILINE)
_READY_SECONDS = 60.0
_BUILD_SECONDS = 7200  # a busy machine compiles kernels for eight GPUs for an hour


class Docker:
    """A daemon that builds images."""

    def __init__(self, layout: Layout | None = None, say: Say = to_stderr) -> None:
        self._layout = layout or Layout()
        self._processes = Processes(self._layout.docker_run / "processes.json", self._layout.logs)
        self._say = say
        self._host = ""

    @contextmanager
    def running(self) -> Iterator[Docker]:
        """Use the machine's daemon, else start one and end it afterwards. Raises StartError, MissingCommand."""
        if self.there():
            yield self
            return
        remains.note(self._layout.docker_run / "absent.json", remains.DOCKER_FOLDERS)
        try:
            self._start()
            yield self
        finally:
            self.down()

    def down(self) -> None:
        """End a daemon of our own, also one that another process started, and all of it but its layers."""
        with uninterrupted():
            self._processes.stop_all()
            # A build that was cut short leaves its layers mounted.
            left = remains.unmount(self._layout.docker_run, self._layout.cache / "docker")
            remains.forget(self._layout.docker_run / "absent.json")
            if not left:
                shutil.rmtree(self._layout.docker_run, ignore_errors=True)
        self._host = ""

    def there(self) -> bool:
        """Whether this machine runs a daemon."""
        return shutil.which("docker") is not None and self._answers()

    def build(
        self,
        file: Path,
        tag: str,
        *,
        context: Path,
        target: str = "",
        arguments: Mapping[str, str] | None = None,
        platform: str = "",
    ) -> None:
        """Build an image, for this machine or another `platform`, which an emulator runs then. Raises StartError with
        the end of the build's output.
        """
        command = ["build", f"--file={file}", f"--tag={tag}", *self.build_flags()]
        command += [f"--target={target}"] if target else []
        command += [f"--platform={platform}"] if platform else []
        command += [f"--build-arg={key}={value}" for key, value in (arguments or {}).items()]
        started = time.monotonic()
        self._docker(*command, str(context), seconds=_BUILD_SECONDS)
        self._say(f"images: {tag} built in {time.monotonic() - started:.0f} s, {self.megabytes(tag)} MB")

    def build_flags(self) -> list[str]:
        """What a build on this machine needs besides: its network, and where pip finds its index."""
        return ["--network=host", *self._secrets()]

    def shell(self) -> tuple[str, dict[str, str]]:
        """(the client, the variables by which it finds the daemon), for who calls docker himself."""
        return self._client(), self._environment()

    def try_container(self, image: str, *words: str, entrypoint: str = "") -> str:
        """Run a container of an image that is here; what it printed. Raises StartError."""
        flags = [f"--entrypoint={entrypoint}"] if entrypoint else []
        return self._docker("run", "--rm", "--network=none", *flags, image, *(words or ("true",)))

    def save(self, tags: Sequence[str], archive: Path) -> None:
        """Write images as one docker-archive."""
        archive.parent.mkdir(parents=True, exist_ok=True)
        self._docker("save", f"--output={archive}", *tags)

    def megabytes(self, tag: str) -> int:
        """The size of an image's unpacked layers, in 10^6 bytes."""
        return round(int(self._docker("image", "inspect", "--format={{.Size}}", tag)) / 1e6)

    def ensure_base(self, name: str, architecture: str = "") -> bool:
        """Have the base image `name`: from here, from a registry, else made. True when it is a made one.

        `architecture` is Debian's word for another one than this machine's; a daemon has images of one at a time.
        """
        wanted = [f"--platform=linux/{architecture}"] if architecture else []
        label = "{{index .Config.Labels `stoker.stand-in`}}"
        if self._succeeds("image", "inspect", name):
            return self._docker("image", "inspect", f"--format={label}", name).strip() == "true"
        if self._succeeds("pull", "--quiet", *wanted, name):
            return False
        self._say(f"images: no registry serves {name}; making a base image of that name with debootstrap")
        root = self._debootstrap(architecture)
        layer, archive = root.with_suffix(".tar"), root.with_suffix(".image.tar")
        paths = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        try:
            status, output = _output(["tar", "-C", str(root), "-cf", str(layer), "."])
            if status:
                raise StartError(f"tar: {output[-2000:]}")
            config = {"Env": [paths], "Labels": {"stoker.stand-in": "true"}}
            # `docker import` would take it for an image of this machine's processor.
            write_root(archive, name, config, layer, architecture or _architecture())
            self._docker("load", "--quiet", f"--input={archive}")
        finally:
            shutil.rmtree(root, ignore_errors=True)
            layer.unlink(missing_ok=True)
            archive.unlink(missing_ok=True)
        return True

    def _debootstrap(self, architecture: str) -> Path:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        if version not in RELEASES:
            raise StartError(f"no Debian release brings Python {version}; run this with one of {', '.join(RELEASES)}")
        ensure_commands(["debootstrap"], self._say)
        root = self._layout.cache / "base"
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}"]
        command += [f"--arch={architecture}"] if architecture else []
        command += [RELEASES[version], str(root), MIRROR]
        try:
            status, output = _output(command)
        finally:
            # It mounts /proc in there, and removes that only where it ends by itself.
            remains.unmount(root)
        if status:
            raise StartError(f"debootstrap: {output[-2000:]}")
        for name in _UNUSED:
            shutil.rmtree(root / name, ignore_errors=True)
        for name in ("setuptools", "pkg_resources", "wheel"):
            shutil.rmtree(root / "usr/lib/python3/dist-packages" / name, ignore_errors=True)
        # As the image has it whose name this takes.
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        return root

    def _start(self) -> None:
        ensure_commands(["dockerd", "runc", "iptables"], self._say)
        layout = self._layout
        layout.docker_run.mkdir(parents=True, exist_ok=True)
        self._host = f"unix://{layout.docker}"
        command = [
            shutil.which("dockerd") or "dockerd",
            f"--host={self._host}",
            f"--pidfile={layout.docker_run / 'docker.pid'}",
        ]
        command += [f"--data-root={layout.cache / 'docker'}", f"--exec-root={layout.docker_run / 'exec'}"]
        command += ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false"]
        self._processes.start("dockerd", command)
        self._processes.wait("dockerd", self._answers, _READY_SECONDS)

    def _secrets(self) -> list[str]:
        """What pip needs on this machine to reach its index; a secret leaves no trace in the image."""
        lines, settings = ["[global]"], _pip_settings()
        for name in ("index-url", "extra-index-url", "trusted-host"):
            value = os.environ.get(f"PIP_{name.upper().replace('-', '_')}") or settings.get(name)
            lines += [f"{name} = {value}"] if value else []
        authorities = os.environ.get("PIP_CERT") or settings.get("cert") or os.environ.get("SSL_CERT_FILE", "")
        secrets = []
        if authorities and Path(authorities).is_file():
            lines.append("cert = /run/secrets/ca.crt")
            secrets.append(f"--secret=id=ca.crt,src={authorities}")
        file = self._layout.cache / "pip.conf"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_text("\n".join(lines) + "\n")
        return [*secrets, f"--secret=id=pip.conf,src={file}"]

    def _answers(self) -> bool:
        return self._succeeds("version")

    def _succeeds(self, *arguments: str) -> bool:
        command = [self._client(), *arguments]
        return subprocess.run(command, env=self._environment(), capture_output=True).returncode == 0

    def _docker(self, *arguments: str, seconds: float = 600) -> str:
        command = [self._client(), *arguments]
        done = subprocess.run(command, env=self._environment(), capture_output=True, text=True, timeout=seconds)
        if done.returncode:
            raise StartError(f"docker {arguments[0]}:\n{(done.stdout + done.stderr)[-3000:]}")
        return done.stdout

    def _client(self) -> str:
        """Beside our own daemon, the client of the same package: a newer one builds by a plug-in it may lack."""
        ours = "/usr/bin/docker"
        return ours if self._host and os.access(ours, os.X_OK) else shutil.which("docker") or ours

    def _environment(self) -> dict[str, str]:
        host = {"DOCKER_HOST": self._host} if self._host else {}
        return os.environ | {"DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"} | host


def _architecture() -> str:
    """This machine's processor, in Go's word."""
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def _output(command: list[str]) -> tuple[int, str]:
    """(status, output) of a command; when this is interrupted, all that the command started ends with it."""
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, stdout=pipe, stderr=both, text=True, start_new_session=True) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output


def _pip_settings() -> dict[str, str]:
    """What pip's files set for all its commands, the last file winning; pip 26 denies a setting when asked by name."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    return dict(_SETTING.findall(subprocess.run(command, capture_output=True, text=True).stdout))
