"""A lost control connection is opened again: a firewall may drop it, and the training goes on.

The two ends notice the loss at different moments, and an attempt may fail at one end alone. So each
end counts its attempts, and writes the number into torch's key-value store. An end whose number is
lower takes over the other one's; with equal numbers they connect, under a name with that number.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron_adaptra.agree.store import KeyValueStore
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.transport.connect import store_connection
from megatron_adaptra.transport.gloo import GlooTransport, open_links


class Relink:
    """A relink opens the connection of `transport` to member `peer` again, for a Channel.

    Args:
        transport: whose connection is replaced.
        members: the global ranks that have control connections, the leader first. Connections join
            the leader with each other member, so this rank or `peer` is the leader.
        peer: index in `members`.
        name: under which the connections were opened; the same on both ends.
        devices: gloo's, as for `open_links`.
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
        self._attempt = 0  # the number of the last one

    def __call__(self, over: threading.Event) -> bool:
        """Wait for the other end and connect.

        Returns whether there is a new connection; False once `over` is set.
        """
        store = KeyValueStore(f"adaptra/{self._name}/")
        me = dist.get_rank()
        mine, theirs = f"{me}>{self._members[self._peer]}", f"{self._members[self._peer]}>{me}"
        self._attempt += 1
        pause = waits.LOOK_UP
        while not over.wait(pause):
            other = int(store.get(theirs) or 0)
            self._attempt = max(self._attempt, other)
            if store.put(mine, str(self._attempt)) and self._attempt == other:
                try:
                    self._connect()
                    return True
                except PeerLost:
                    self._attempt += 1
            pause = min(2 * pause, waits.POLL)
        return False

    def _connect(self) -> None:
        # From the leader, which is member 0, to the other one of the two.
        link = (0, self._peer or self._members.index(dist.get_rank()))
        name = f"{self._name}/{self._attempt}"
        connections = open_links(
            self._members, [link], name, "member", self._devices, waits.CLOSE, store_connection()
        )
        self._transport.add(*connections)
