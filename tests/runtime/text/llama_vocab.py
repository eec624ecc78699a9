"""Fetch the vocabularies, tokenizer vectors and chat templates that llama.cpp ships, for the tests beside this file.

They come in the source distribution of llama-cpp-python (about 75 MB), through pip; 80 MB of it are kept under
`.stoker/llama-vocab`. Run as a script: it does nothing when they are there, and says what it does otherwise.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[3] / ".stoker" / "llama-vocab"
PACKAGE = "llama-cpp-python==0.3.36"
INSIDE = "/vendor/llama.cpp/models/"


def wanted(member: tarfile.TarInfo) -> bool:
    """Vocabularies with vectors, and templates."""
    return member.isfile() and INSIDE in member.name and (".gguf" in member.name or member.name.endswith(".jinja"))


def fetch() -> int:
    """Download and unpack; the exit status."""
    print(f"vocabularies: downloading {PACKAGE} for llama.cpp's tokenizer vectors (75 MB)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", "llama-cpp-python", "--dest", folder, PACKAGE]
        if subprocess.run(command, check=False).returncode != 0:
            print("vocabularies: not available; the tests that need them are skipped")
            return 0
        archive = next(Path(folder).glob("*.tar.gz"))
        partial = FOLDER.with_suffix(".partial")
        partial.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as source:
            for member in filter(wanted, source):
                data = source.extractfile(member)
                assert data is not None, "it is a file"
                (partial / Path(member.name).name).write_bytes(data.read())
        partial.rename(FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(0 if FOLDER.is_dir() else fetch())
