"""torch's key-value store, which may be slow or dead: nothing here raises or waits for long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_adaptra import waits

Answer = TypeVar("Answer")


class KeyValueStore:
    """Of `store`, keys with a `prefix`; without one of the job's own, over another connection."""

    def __init__(self, prefix: str, store: dist.Store | None = None) -> None:
        if store is None:
            store = dist.distributed_c10d._get_default_store()
            with contextlib.suppress(RuntimeError):  # a request that hangs holds up nobody else's
                store = store.clone()
        self._store: Any = store
        self._prefix = prefix
        self._busy = threading.Lock()  # one request at a time: those that hang do not add up

    def close(self) -> None:
        """End the connection; from now on nobody answers."""
        self._store = None

    def put(self, key: str, text: str) -> bool:
        """Set `key` to `text`; False when that is not certain to have worked."""

        def act() -> bool:
            self._store.set(self._prefix + key, text)
            return True

        return self._ask(act) is True

    def put_first(self, key: str, text: str) -> None:
        """Set `key` to `text` unless it has a value already."""
        self._ask(lambda: self._store.compare_set(self._prefix + key, "", text))

    def get(self, key: str) -> str | None:
        """The value of `key`; None where it has none, or nobody answers."""

        def act() -> str | None:
            there = self._store.check([self._prefix + key])
            return self._store.get(self._prefix + key).decode() if there else None

        return self._ask(act)

    def _ask(self, act: Callable[[], Answer]) -> Answer | None:
        """What `act` returns; None when it raises, or that takes longer than `waits.STORE`.

        It may be done later nevertheless.
        """
        if not self._busy.acquire(timeout=waits.STORE):
            return None
        found: list[Answer] = []

        def run() -> None:
            try:
                with contextlib.suppress(Exception):
                    found.append(act())
            finally:
                self._busy.release()

        thread = threading.Thread(target=run, name="adaptra-store", daemon=True)
        thread.start()
        thread.join(waits.STORE)
        return found[0] if found else None
