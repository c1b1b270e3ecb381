"""A notebook that all ranks share: torch's key-value store, which outlives a dead rank."""

from __future__ import annotations

import contextlib
import threading

import torch.distributed as dist

from megatron_adaptra.runtime.watchdog import Notebook

_KEY = "adaptra/lost"
_PATIENCE = 2.0  # seconds; the store may have died too


class StoreNotebook(Notebook):
    """The first word written stays. Never raises, never blocks for long."""

    def __init__(self) -> None:
        super().__init__()
        self._store = dist.PrefixStore(_KEY, dist.distributed_c10d._get_default_store().clone())

    def write(self, text: str) -> None:
        super().write(text)
        self._try(lambda: self._store.compare_set("first", "", text))

    def read(self) -> str:
        found: list[str] = []

        def look() -> None:
            if self._store.check(["first"]):
                found.append(self._store.get("first").decode())

        self._try(look)
        return found[0] if found else super().read()

    def _try(self, action: object) -> None:
        def run() -> None:
            with contextlib.suppress(Exception):
                action()  # type: ignore[operator]

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(_PATIENCE)
