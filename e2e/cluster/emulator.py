"""Another processor's programs run on this machine, by QEMU in the kernel's name (binfmt_misc), while it is needed.

Invariants: an emulator that the machine has is used and left alone; of ours nothing stays.
Knows nothing of what is run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.binaries import Say, to_stderr
from e2e.cluster.debian import ensure_commands
from e2e.cluster.node import run
from e2e.cluster.processes import uninterrupted

MACHINE, COMMAND = "aarch64", "qemu-aarch64-static"
_KERNEL = Path("/proc/sys/fs/binfmt_misc")
_NAME = f"stoker-{MACHINE}"
# An ELF file's first 20 bytes: 64 bits, little-endian, a program of either kind, for this machine (183).
_MAGIC = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xb7\x00"
_MASK = b"\xff" * 7 + b"\x00" + b"\xff" * 8 + b"\xfe" + b"\xff" * 3


@contextmanager
def emulated(say: Say = to_stderr) -> Iterator[None]:
    """Within it, programs for linux/arm64 run, in containers too. Raises StartError, MissingCommand."""
    if runs():
        yield
        return
    ensure_commands([COMMAND, "mount"], say)
    mounted = not (_KERNEL / "register").exists()
    if mounted:
        run(["mount", "-t", "binfmt_misc", "binfmt_misc", str(_KERNEL)])
    try:
        program = shutil.which(COMMAND)
        # F: the kernel opens the emulator now, so that containers need not have it.
        (_KERNEL / "register").write_text(f":{_NAME}:M::{_escaped(_MAGIC)}:{_escaped(_MASK)}:{program}:F")
        yield
    finally:
        with uninterrupted():
            if (_KERNEL / _NAME).exists():
                (_KERNEL / _NAME).write_text("-1")
            if mounted:
                run(["umount", str(_KERNEL)])


def runs() -> bool:
    """Whether this machine runs such programs already."""
    entries = _KERNEL.iterdir() if _KERNEL.exists() else ()
    told = (entry.read_text() for entry in entries if entry.name not in ("register", "status"))
    return any(f"magic {_MAGIC.hex()}" in text for text in told)


def _escaped(code: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in code)
