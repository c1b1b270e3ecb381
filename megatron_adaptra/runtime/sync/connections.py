"""What carries a vote on shares of microbatches between all ranks of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_adaptra.runtime.collectives.connected import Opener, connect
from megatron_adaptra.transport.base import Transport
from megatron_adaptra.transport.wire import Wire


@dataclass(frozen=True)
class SyncConnections:
    """`control`: of the first rank, which leads, with each other one. `wire`: its own."""

    control: Transport
    wire: Wire

    @classmethod
    def between(
        cls,
        group: Any,
        timeout: float,
        transport: str = "auto",
        encrypt: bool = False,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> SyncConnections:
        """Connect all ranks of `group`, those of the job: a collective of it.

        `timeout` (seconds), `transport`, `encrypt`, `gather`: as for `connect`, whose errors come
        through.
        """

        def open_all(opener: Opener) -> SyncConnections:
            return cls(opener.control("control"), opener.wire)

        return connect(group, "sync", open_all, timeout, transport, encrypt, gather)

    def close(self) -> None:
        """End them; what is under way is aborted."""
        self.control.close()
        self.wire.close()
