"""Where the ranks of a job publish addresses and the secret, before they are connected.

A training uses torch's store (`StoreRendezvous` in engine_wire.py). `FolderRendezvous` serves the
engine's benchmarks and tests, whose hundreds of processes would start too slowly with torch.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol


class Rendezvous(Protocol):
    """A key-value store that all ranks share."""

    def put(self, key: str, text: str) -> None:
        """Set `key` to `text`."""

    def put_first(self, key: str, text: str) -> None:
        """Set `key` to `text` unless it has a value."""

    def get(self, key: str) -> str | None:
        """The value of `key`, if there is one."""


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
