"""The ranks of a group that vote on their all-reduce, fed with reductions that never took place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist
from patience import PATIENCE
from telemetry.late_ranks import messages
from transport.loopback import LoopbackNetwork
from transport.ranks import until

from megatron_adaptra.plan.collectives.choice import Choice
from megatron_adaptra.plan.collectives.ring import ring
from megatron_adaptra.runtime.agreement import Ballot, DecisionStore
from megatron_adaptra.runtime.all_reduce.decisions import AllReduceLog
from megatron_adaptra.runtime.all_reduce.loop import AllReduceLoop
from megatron_adaptra.runtime.all_reduce.value import ALL_REDUCE, GroupAllReduce
from megatron_adaptra.runtime.bundle import Bundle
from megatron_adaptra.runtime.channel import Channel
from megatron_adaptra.runtime.controller import Member
from megatron_adaptra.runtime.leader import Leader
from megatron_adaptra.runtime.store import KeyValueStore
from megatron_adaptra.sim.ports import Ports, run_on_ports
from megatron_adaptra.telemetry.reduction_report import ReductionReport

MS = 1e-3
RATE = 20e6
NBYTES = 3_200_000
BUFFER = NBYTES / RATE


class VotedGroup:
    """All ranks of a group, in one thread; control threads are theirs.

    `ran`: by iteration the choice that all of them ran. `took`: seconds after the last arrival.
    """

    def __init__(self, ranks: int, path: Path, min_gain: float = 0.05) -> None:
        self.ranks, self.ran, self.took = ranks, list[Choice](), list[float]()
        self._network, store = LoopbackNetwork(), dist.HashStore()
        self._transports = [self._network.open(rank) for rank in range(ranks)]
        self.controllers: list[Leader | Member] = []
        for rank, transport in reversed(list(enumerate(self._transports))):
            peers = [0] if rank else range(1, ranks)
            channels = {peer: Channel(transport, peer) for peer in peers}
            ballot = Ballot(Bundle({ALL_REDUCE: GroupAllReduce(Choice(ranks))}))
            decisions = DecisionStore(KeyValueStore("", lambda: store))
            if rank:
                self.controllers.append(Member(ballot, channels, decisions, PATIENCE))
            else:
                self.loop = AllReduceLoop(range(8, 8 + ranks), min_gain, AllReduceLog(path))
                self.controllers.append(Leader(ballot, channels, decisions, self.loop))
        self.controllers.reverse()

    @property
    def leader(self) -> Leader:
        assert isinstance(self.controllers[0], Leader)
        return self.controllers[0]

    def train(
        self,
        iterations: int,
        late: Mapping[int, float] | None = None,
        rates: Sequence[float] | None = None,
        silent: Sequence[int] = (),
        factor: float = 1.0,
    ) -> list[Choice]:
        """What ran; ranks are `late` by seconds, their ports have `rates`, the `silent` report not.

        `factor`: plans take so many times as long as the clock of ports has it.
        """
        late = late or {}
        ports = Ports.equal(list(rates or [RATE] * self.ranks), 0.3 * MS, 0.1 * MS)
        for iteration in range(len(self.ran), len(self.ran) + iterations):
            bundles = [one.begin(iteration) for one in self.controllers]
            assert len({bundle.digest for bundle in bundles}) == 1, "all ranks run the same"
            choice = bundles[0][ALL_REDUCE].choice
            self.ran.append(choice)
            lateness = [late.get(rank, 0.0) for rank in range(self.ranks)]
            plan = choice.plan()
            took = run_on_ports(plan or ring(self.ranks, 2), NBYTES, ports, lateness).after_arrival
            self.took.append(took if plan is None else factor * took)
            seen = messages(self.ranks, late)
            for rank, controller in enumerate(self.controllers):
                if rank not in silent:
                    paths = {
                        source: min(ports.out[source], ports.into[rank])
                        for source in range(self.ranks)
                        if source != rank
                    }
                    seconds = self.took[-1] + max(lateness) - lateness[rank]
                    controller.report_reduction(
                        ReductionReport(
                            rank, iteration, NBYTES, seen[rank], paths, seconds, 5 * BUFFER
                        )
                    )
            until(partial(self._dealt_with, iteration, silent), f"iteration {iteration}")
        return self.ran[-iterations:]

    def _dealt_with(self, iteration: int, silent: Sequence[int]) -> bool:
        self.loop.drain(PATIENCE)
        there = self.loop.seen == iteration
        if silent:
            there = len(self.loop._rows.get(iteration, {})) == self.ranks - len(silent)
        proposal = self.leader._open
        return there and (proposal is None or proposal.committed is not None)

    def close(self) -> None:
        for controller in self.controllers:
            controller.close()
        for transport in self._transports:
            transport.close()
        self._network.close()
