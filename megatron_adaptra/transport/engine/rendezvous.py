"""Where the ranks of a job publish addresses and the secret, before they are connected.

A training uses torch's store: `StoreRendezvous` in engine_wire.py.
"""

from __future__ import annotations

from typing import Protocol


class Rendezvous(Protocol):
    """A key-value store that all ranks share."""

    def put(self, key: str, text: str) -> None:
        """Set `key` to `text`."""

    def put_first(self, key: str, text: str) -> None:
        """Set `key` to `text` unless it has a value."""

    def get(self, key: str) -> str | None:
        """The value of `key`, if there is one."""
