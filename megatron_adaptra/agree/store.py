"""torch's key-value store, which may be slow or dead: nothing here raises or waits for long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from megatron_adaptra.base import waits
from megatron_adaptra.base.exits import wait_at_exit
from megatron_adaptra.transport.connect import store_connection

Answer = TypeVar("Answer")


class KeyValueStore:
    """A key-value store reads and writes keys with a `prefix` in the store that `connect` gives.

    The first request opens the connection. One that fails is renewed: it may be idle for days,
    after which firewalls drop it.
    """

    def __init__(self, prefix: str, connect: Callable[[], Any] = store_connection) -> None:
        self._connect = connect
        self._store: Any = None
        self._prefix, self._open = prefix, True
        self._busy = threading.Lock()  # one request at a time: those that hang do not add up

    def close(self) -> None:
        """End the connection; later requests get no answer."""
        self._open, self._store = False, None

    def put(self, key: str, text: str) -> bool:
        """Set `key` to `text`; False when that is not certain to have worked."""

        def act() -> bool:
            self._store.set(self._prefix + key, text)
            return True

        return self._ask(act) is True

    def put_first(self, key: str, text: str) -> str | None:
        """Set `key` to `text` unless it has a value already, other than an empty one.

        Returns its value from now on; None where the store does not answer.
        """

        def act() -> str:
            value = self._store.compare_set(self._prefix + key, "", text)
            return str(value.decode())

        return self._ask(act)

    def get(self, key: str) -> str | None:
        """Return the value of `key`; None where it has none, or the store does not answer."""

        def act() -> str | None:
            there = self._store.check([self._prefix + key])
            return self._store.get(self._prefix + key).decode() if there else None

        return self._ask(act)

    def add(self, key: str) -> int | None:
        """Count `key` up by one, from 0; return the count, or None without an answer."""
        return self._ask(lambda: int(self._store.add(self._prefix + key, 1)))

    def delete(self, key: str) -> None:
        """Delete `key`, if the store answers."""
        self._ask(lambda: self._store.delete_key(self._prefix + key))

    def get_all(self, keys: Iterable[str]) -> dict[str, str] | None:
        """Return the values of those of `keys` that have one.

        None where the store does not answer for all of them in time.
        """
        found: dict[str, str] = {}

        def act() -> bool:
            names = {self._prefix + key: key for key in keys}
            there = list(names)
            if not self._store.check(there):  # mostly all are there: one trip for all of them
                there = [name for name in there if self._store.check([name])]
            values = self._store.multi_get(there) if there else []
            found.update((names[n], value.decode()) for n, value in zip(there, values, strict=True))
            return True

        return found if self._ask(act) else None

    def _ask(self, act: Callable[[], Answer]) -> Answer | None:
        """Return the result of `act`; None when it raises, or takes longer than `waits.STORE`.

        It may still be done after that.
        """
        if not self._busy.acquire(timeout=waits.STORE):
            return None
        found: list[Answer] = []

        def run() -> None:
            try:
                with contextlib.suppress(Exception):
                    if self._store is not None:
                        found.append(act())
                        return
                with contextlib.suppress(Exception):
                    if self._open:
                        self._store = self._connect()
                        found.append(act())
            finally:
                self._busy.release()

        thread = threading.Thread(target=run, name="adaptra-store", daemon=True)
        wait_at_exit(thread)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends: from 3.12 on it takes no more threads
            self._busy.release()
            return None
        thread.join(waits.STORE)
        return found[0] if found else None
