"""Ranks that vote, in one thread; control threads are theirs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from patience import PATIENCE
from transport.loopback import LoopbackNetwork
from transport.ranks import until

from megatron_adaptra.adapt.leader import Leader
from megatron_adaptra.agree.agreement import Ballot, DecisionStore, Proposal
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.agree.channel import Channel
from megatron_adaptra.agree.controller import Member
from megatron_adaptra.agree.store import KeyValueStore


class VotedRanks:
    """So many, who begin iteration `first` with a `new_ballot` each.

    Rank 0 has the loop that `new_loop` makes. `prepare`: what a rank does with a proposal.
    """

    def __init__(
        self,
        ranks: int,
        new_ballot: Callable[[], Ballot],
        new_loop: Callable[[], Any],
        first: int = 0,
        prepare: Callable[[int, Proposal], None] = lambda rank, one: None,
    ) -> None:
        self._network, store = LoopbackNetwork(), dist.HashStore()
        self._transports = [self._network.open(rank) for rank in range(ranks)]
        self.controllers: list[Leader | Member] = []
        for rank, transport in reversed(list(enumerate(self._transports))):
            peers = [0] if rank else range(1, ranks)
            channels = {peer: Channel(transport, peer) for peer in peers}
            decisions = DecisionStore(KeyValueStore("", lambda: store))
            common: dict[str, Any] = {"first": first, "prepare": partial(prepare, rank)}
            if rank:
                self.controllers.append(
                    Member(new_ballot(), channels, decisions, PATIENCE, **common)
                )
            else:
                self.loop = new_loop()
                self.controllers.append(
                    Leader(new_ballot(), channels, decisions, self.loop, **common)
                )
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

    def until_dealt_with(self, iteration: int) -> None:
        """Until the leader is done with the reports of an `iteration`, and with its proposal."""

        def done() -> bool:
            self.loop.drain(PATIENCE)
            proposal = self.leader._open
            return self._seen(iteration) and (proposal is None or proposal.committed is not None)

        until(done, f"iteration {iteration} is dealt with")

    def _seen(self, iteration: int) -> bool:
        return bool(self.leader.status.get("iteration") == iteration)

    def close(self) -> None:
        for controller in self.controllers:
            controller.close()
        for transport in self._transports:
            transport.close()
        self._network.close()
