"""A folder in which the ranks of a job publish addresses and the secret.

It serves the engine's benchmarks and tests, whose hundreds of processes would start too slowly with
torch, whose store a training uses.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from megatron_adaptra.transport.engine.rendezvous import Rendezvous


class FolderRendezvous(Rendezvous):
    """One file per key in `folder`, which exists; each is written as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, key: str, text: str) -> None:
        self._written(text).replace(self._path(key))

    def put_first(self, key: str, text: str) -> None:
        written = self._written(text)
        with contextlib.suppress(FileExistsError):
            self._path(key).hardlink_to(written)
        written.unlink()

    def get(self, key: str) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return self._path(key).read_text()
        return None

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    def _written(self, text: str) -> Path:
        path = self._folder / f".{os.urandom(8).hex()}"
        path.write_text(text)
        return path
