"""The ranks of a group that vote on their all-reduce, fed with reductions that never took place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from adapt.voted_ranks import VotedRanks
from measure.late_ranks import messages

from benchmarks.common import equal_ports
from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.reductions.decisions import ReductionDecision
from megatron_adaptra.adapt.reductions.remedy import ReductionRemedy
from megatron_adaptra.agree.agreement import Ballot
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.agree.reductions import ALL_REDUCE, GroupReduction
from megatron_adaptra.measure.reduction_report import ReductionReport
from megatron_adaptra.plan.reductions.builders import ring
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Buffers
from megatron_adaptra.sim.ports import run_on_ports

MS = 1e-3
RATE = 20e6
NBYTES = 3_200_000
BUFFER = NBYTES / RATE


class VotedGroup(VotedRanks):
    """All ranks of a group, in one thread; control threads are theirs.

    `delay`: seconds of a message; may be set. So may `overlap`, seconds in which gradients become
    ready while others are reduced, and `last`, bytes of those that are ready last.

    `sharded`: it is a reduce-scatter. Native is gloo's all-reduce, each step of which crosses two
    delays.

    `ran`: by iteration the choice that all of them ran. `took`: seconds after the last arrival.
    """

    def __init__(
        self, ranks: int, path: Path, min_gain: float = 0.05, *, sharded: bool = False,
        delay: float = 0.3 * MS, first: int = 0,
    ) -> None:  # fmt: skip
        self.delay = delay
        self.overlap, self.last = 0.0, NBYTES
        self.ranks, self.ran, self.took = ranks, list[Choice](), list[float]()
        # By rank, of the last reduction: its end after the first one's, and what it took there.
        self._ends, self._took = [0.0] * ranks, [0.0] * ranks
        self._silent: Sequence[int] = ()
        native = GroupReduction(Choice(ranks, sharded=sharded))
        super().__init__(
            ranks, lambda: Ballot(Bundle({ALL_REDUCE: native})),
            lambda: Loop(ReductionRemedy(
                range(8, 8 + ranks), min_gain, DecisionLog(ReductionDecision, path)
            )), first,
        )  # fmt: skip

    def _seen(self, iteration: int) -> bool:
        if self._silent:
            return len(self.loop._rows.get(iteration, {})) == self.ranks - len(self._silent)
        return bool(self.loop.seen == iteration)

    def train(
        self,
        iterations: int,
        late: Mapping[int, float] | None = None,
        rates: Sequence[float] | None = None,
        silent: Sequence[int] = (),
        factor: float = 1.0,
        longer: float = 1.0,
        computes: float = 1.0,
    ) -> list[Choice]:
        """What ran; ranks are `late` by seconds, their ports have `rates`, the `silent` report not.

        They are later still where their last reduction has ended later.

        `factor`: plans take so many times as long as the clock of ports has it. `longer`: all
        reductions do, and `computes`: what ranks do between them.
        """
        late = late or {}
        ports = equal_ports(list(rates or [RATE] * self.ranks), self.delay, 0.1 * MS)
        natively = replace(ports, delay=2 * self.delay)
        for iteration in range(len(self.ran), len(self.ran) + iterations):
            choice = self._begin(iteration)[ALL_REDUCE].choice
            self.ran.append(choice)
            computed = [end + late.get(r, 0.0) for r, end in enumerate(self._ends)]
            lateness = [moment - min(computed) for moment in computed]
            plan = choice.plan()
            how = (ring(self.ranks, 2), NBYTES, natively) if plan is None else (plan, NBYTES, ports)
            run, last = (run_on_ports(how[0], n, how[2], lateness) for n in (how[1], self.last))
            hidden = zip(run.ends, last.ends, strict=True)
            ends = [max(whole, self.overlap + tail) for whole, tail in hidden]
            exposed = max(ends) - max(lateness) - self.overlap
            more = ((1.0 if plan is None else factor) * longer - 1) * exposed
            self.took.append(exposed + more)
            seen = messages(self.ranks, dict(enumerate(lateness)), delay=self.delay)
            for rank, controller in enumerate(self.controllers):
                if rank not in silent:
                    paths = {
                        source: min(ports.out[source], ports.into[rank])
                        for source in range(self.ranks)
                        if source != rank
                    }
                    seconds = ends[rank] + more - lateness[rank]
                    between = computes * (5 * BUFFER + late.get(rank, 0.0))
                    buffers = Buffers(overlap=self.overlap, last=self.last)
                    report = ReductionReport(
                        rank, iteration, NBYTES, seen[rank], paths, seconds,
                        self._took[rank] + between, between, buffers,
                    )  # fmt: skip
                    controller.hand_in(report)
            self._took = [end + more - came for end, came in zip(ends, lateness, strict=True)]
            self._ends = [end - min(ends) for end in ends]
            self._silent = silent
            self.until_dealt_with(iteration)
        return self.ran[-iterations:]
