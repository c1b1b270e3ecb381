"""A control connection that is lost is made anew: a firewall may drop it, and the training goes on.

The two ends notice the loss at different moments, and an attempt may fail at one end alone. So each
end writes into torch's key-value store how often it has come, and follows the other one where that
has come more often; those that have come equally often connect, under that number.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron_adaptra import waits
from megatron_adaptra.errors import PeerLost
from megatron_adaptra.runtime.store import KeyValueStore
from megatron_adaptra.transport.connect import store_connection
from megatron_adaptra.transport.gloo import GlooTransport, open_links


class Relink:
    """Connects `transport` anew to member `peer`, for a Channel.

    `members`: by index, the global ranks; this one is the first of them, or `peer` is. `name`: of
    the connections as they were opened. `devices`: one or more, see `open_links`.
    """

    def __init__(
        self,
        transport: GlooTransport,
        members: Sequence[int],
        peer: int,
        name: str,
        devices: Sequence[Any],
    ) -> None:
        self._transport, self._members, self._peer = transport, tuple(members), peer
        self._name, self._devices = name, devices
        self._came = 0  # how often

    def __call__(self, over: threading.Event) -> bool:
        """Whether there is a new connection, before `over` is set; the other end is waited for."""
        store = KeyValueStore(f"adaptra/{self._name}/")
        me = dist.get_rank()
        mine, theirs = f"{me}>{self._members[self._peer]}", f"{self._members[self._peer]}>{me}"
        self._came += 1
        pause = waits.LOOK_UP
        while not over.wait(pause):
            other = int(store.get(theirs) or 0)
            self._came = max(self._came, other)
            if store.put(mine, str(self._came)) and self._came == other:
                try:
                    self._connect()
                    return True
                except PeerLost:
                    self._came += 1
            pause = min(2 * pause, waits.POLL)
        return False

    def _connect(self) -> None:
        link = (0, self._peer or self._members.index(dist.get_rank()))
        name = f"{self._name}/{self._came}"
        connections = open_links(
            self._members, [link], name, "member", self._devices, waits.CLOSE, store_connection()
        )
        self._transport.replace(self._peer, *connections)
