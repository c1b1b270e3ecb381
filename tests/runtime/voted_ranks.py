"""Ranks that vote on one kind of value, in one thread; control threads are theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from patience import PATIENCE
from transport.loopback import LoopbackNetwork

from megatron_adaptra.runtime.agreement import Ballot, DecisionStore
from megatron_adaptra.runtime.all_reduce.loop import AllReduceLoop
from megatron_adaptra.runtime.bundle import Bundle
from megatron_adaptra.runtime.channel import Channel
from megatron_adaptra.runtime.controller import Member
from megatron_adaptra.runtime.leader import Leader
from megatron_adaptra.runtime.store import KeyValueStore


class VotedRanks:
    """So many, who begin iteration `first` with the bundle `values`.

    Rank 0 has the loop that `new_loop` makes.
    """

    loop: AllReduceLoop

    def __init__(
        self,
        ranks: int,
        values: dict[str, Any],
        new_loop: Callable[[], AllReduceLoop],
        first: int = 0,
    ) -> None:
        self._count = ranks
        self._network, store = LoopbackNetwork(), dist.HashStore()
        self._transports = [self._network.open(rank) for rank in range(ranks)]
        self.controllers: list[Leader | Member] = []
        for rank, transport in reversed(list(enumerate(self._transports))):
            peers = [0] if rank else range(1, ranks)
            channels = {peer: Channel(transport, peer) for peer in peers}
            ballot = Ballot(Bundle(values))
            decisions = DecisionStore(KeyValueStore("", lambda: store))
            if rank:
                self.controllers.append(Member(ballot, channels, decisions, PATIENCE, first=first))
            else:
                self.loop = new_loop()
                self.controllers.append(Leader(ballot, channels, decisions, self.loop, first=first))
        self.controllers.reverse()

    @property
    def leader(self) -> Leader:
        assert isinstance(self.controllers[0], Leader)
        return self.controllers[0]

    def _begin(self, iteration: int) -> Bundle:
        """What all ranks run in an `iteration`."""
        bundles = [one.begin(iteration) for one in self.controllers]
        assert len({bundle.digest for bundle in bundles}) == 1, "all ranks run the same"
        return bundles[0]

    def _dealt_with(self, iteration: int, silent: Sequence[int]) -> bool:
        """Whether the leader is done with the reports of an `iteration`, but for the `silent`."""
        self.loop.drain(PATIENCE)
        there = self.loop.seen == iteration
        if silent:
            there = len(self.loop._rows.get(iteration, {})) == self._count - len(silent)
        proposal = self.leader._open
        return there and (proposal is None or proposal.committed is not None)

    def close(self) -> None:
        for controller in self.controllers:
            controller.close()
        for transport in self._transports:
            transport.close()
        self._network.close()
