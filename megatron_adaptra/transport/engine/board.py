"""A board for processes that share a folder: benchmarks and tests, which need no torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class FolderBoard:
    """Words in files of `folder`, which exists; each is written as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, key: str, text: str) -> None:
        """Set `key` to `text`."""
        self._written(text).replace(self._path(key))

    def put_first(self, key: str, text: str) -> None:
        """Set `key` to `text` unless it has a value."""
        written = self._written(text)
        with contextlib.suppress(FileExistsError):
            self._path(key).hardlink_to(written)
        written.unlink()

    def get(self, key: str) -> str | None:
        """The value of `key`, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            return self._path(key).read_text()
        return None

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    def _written(self, text: str) -> Path:
        path = self._folder / f".{os.urandom(8).hex()}"
        path.write_text(text)
        return path
