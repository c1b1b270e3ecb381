"""What the package says while it runs: lines on standard error."""

from __future__ import annotations

import os


def log_line(text: str) -> None:
    """Write `text` as one line, whole even when many ranks write at once."""
    os.write(2, f"adaptra: {text}\n".encode())


class LogOnce:
    """Writes every text once. `speaks`: whether this process writes at all; rank 0 does."""

    def __init__(self, speaks: bool) -> None:
        self._speaks, self._written = speaks, set[str]()

    def line(self, text: str) -> None:
        """Write `text` as a line, unless it has been written."""
        if self._speaks and text not in self._written:
            self._written.add(text)
            log_line(text)
