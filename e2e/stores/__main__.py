"""Serves one folder as clouds do, in a pod: `python -m e2e.stores FOLDER HOST PORT OTHER_PORT`.

    PORT    gs://BUCKET/PREFIX and az://BUCKET/PREFIX        OTHER_PORT    modelscope://PREFIX, its branch master

Who may ask is in the variable STORES, a JSON: `bucket`, `prefix` (ORG/NAME), `account` (Azure's name and key),
`signers` (of Google's service accounts), `token` (ModelScope's), `storage` (another name of OTHER_PORT).

Invariants: standard library only; what was asked is printed nowhere.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from e2e.modelscope.server import ModelScope
from e2e.stores.server import Access, ObjectStore


def main(folder: Path, host: str, port: int, other_port: int) -> None:
    """Serve until the process is ended."""
    told = json.loads(os.environ.pop("STORES"))
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    store, scope = ObjectStore(host, port), ModelScope(host, other_port)
    name, key = told["account"]
    signers = {who: (int(modulus), int(exponent)) for who, (modulus, exponent) in told["signers"].items()}
    store.access = Access(account=(name, key), signers=signers)
    store.buckets = {told["bucket"]: {f"{told['prefix']}/{file}": content for file, content in files.items()}}
    scope.repositories = {told["prefix"]: {"master": files}}
    scope.token, scope.storage = told["token"], told["storage"]
    threading.Thread(target=scope.serve_forever, daemon=True).start()
    store.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
