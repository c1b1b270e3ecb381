"""What the package says while it runs: lines on standard error."""

from __future__ import annotations

import os


def log_line(text: str) -> None:
    """Write one line, whole even when many ranks write at once."""
    os.write(2, f"adaptra: {text}\n".encode())
