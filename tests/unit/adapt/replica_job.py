"""A training of several replicas without threads or a clock: what the remedy sees of it.

Each iteration is simulated under the true conditions, with a little noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adapt.fed_job import FedJob

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.routes.remedy import RouteRemedy
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.config import UNLIMITED, Budget
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.program import Program, lower
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import Path
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.iteration_record import IterationRecord, OpTime
from megatron_adaptra.measure.link_probe import NBYTES
from megatron_adaptra.measure.replica_estimate import ReplicaEstimator
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.plan import server
from megatron_adaptra.plan.pipeline.fixed import first_schedule
from megatron_adaptra.plan.routes.reroute import ReplicaPlan
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.transport.base import Stamps

MS = 1e-3
FORWARD, BACKWARD = 20 * MS, 40 * MS
DELAY = 0.1 * MS  # of a healthy path
MESSAGE = 1 << 20
SIGMA = 0.02  # of the logarithm of what an iteration's ops take on one worker
BURSTS = 0.02  # share of a worker's iterations in which ops take longer: SPAN times as long
SPAN = 1.1, 2.0

Reports = Mapping[int, StageReport] | Sequence[StageReport]
Spoil = Callable[[int, dict[int, StageReport]], Reports]


@dataclass(frozen=True)
class Truth:
    """What really takes how long.

    `slow`: factors, by worker. `paths`: delays. `hidden`: factor of an iteration in which replicas
    help each other, which nothing measures. `core_share`: of slow workers, where cores are shared.
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    paths: Mapping[Path, float] = field(default_factory=dict)
    hidden: float = 1.0
    core_share: Mapping[int, float] = field(default_factory=dict)


def _search(conditions: ReplicaConditions, sends: str, ops: int) -> Sequence[Schedule]:
    """Search with a tenth of the `ops`, in this process."""
    return server.search(conditions, sends, ops // 10)


class Job(FedJob[ReplicaPlan, ReplicaConditions]):
    """A training of so many `replicas` x `stages` x `count`, seeded, for which `truth` holds.

    Workers may hold `plus` microbatches beyond 1F1B's until a `budget` in bytes is known to be
    another number; all share `cores`.

    `took`: the seconds of every iteration; `stays`: why nothing was proposed, by iteration;
    `probed`: the cross paths that have been opened.
    """

    def __init__(
        self, replicas: int = 2, stages: int = 3, count: int = 8, mode: str = "auto", seed: int = 0,
        plus: float = float("inf"), budget: Budget = UNLIMITED,
        cores: float | None = None,
    ) -> None:  # fmt: skip
        self.cores = cores
        self.replicas, self.stages, self.count, self.truth = replicas, stages, count, Truth()
        self.rng = random.Random(seed)
        one = first_schedule(stages, count, float("inf"))
        start = one.replicated(replicas)
        most = [held + plus for held in one.peak_in_flight()]
        each = [
            Estimator(
                count,
                ["host"] * stages,
                self._own_cores,
                MESSAGE,
                budget,
                at_first=most,
                first=first,
            )
            for first in range(0, replicas * stages, stages)
        ]
        for estimator in each:
            estimator.budgets = tuple(most)
        self.budgets = each[0].budgets
        self.estimator = ReplicaEstimator(each)
        rule = ReplanPolicy(sends="eager")
        log = DecisionLog(PlanDecision, None)
        remedy = RouteRemedy(start, self.estimator, rule, log, (), mode)
        remedy._search = _search  # type: ignore[assignment]
        super().__init__(start, remedy)
        self.took: list[float] = []
        self.stays: dict[int, str] = {}
        self.probed: set[Path] = set()
        self.deaf: set[Path] = set()  # cross paths whose probes do not arrive
        self.spoil: Spoil = lambda iteration, reports: reports
        self._program: tuple[Schedule, Program] | None = None

    @property
    def _own_cores(self) -> float | None:
        return None if self.cores is None else self.cores / self.replicas

    def conditions(self, noisy: bool = False) -> ReplicaConditions:
        """The truth."""
        links = {
            link: LinkState(DELAY)
            for s in range(self.stages - 1)
            for link in ((s, s + 1), (s + 1, s))
        }
        half = (BACKWARD / 2,) * self.stages
        forward = (FORWARD,) * self.stages
        pipeline = Conditions(
            self.count, forward, half, half, links, split=False, activation_budget=self.budgets,
            cores=self._own_cores,
        )  # fmt: skip
        slow = {w: self.truth.slow.get(w, 1.0) for w in range(self.replicas * self.stages)}
        if noisy:
            for worker in slow:
                slow[worker] *= self.rng.lognormvariate(0.0, SIGMA)
                slow[worker] *= self.rng.uniform(*SPAN) if self.rng.random() < BURSTS else 1.0
        paths = {path: LinkState(delay) for path, delay in self.truth.paths.items()}
        shares = self.truth.core_share
        return ReplicaConditions(pipeline, self.replicas, slow=slow, paths=paths, core_share=shares)

    def seconds(self, schedule: Schedule) -> float:
        """What an iteration of it takes now, without noise."""
        makespan = self._simulated(schedule, self.conditions()).makespan
        return makespan * (self.truth.hidden if schedule.routes.moved else 1.0)

    def _simulated(self, schedule: Schedule, conditions: ReplicaConditions) -> Timeline:
        if self._program is None or self._program[0] is not schedule:
            self._program = schedule, lower(schedule)
        return simulate(self._program[1], conditions, "eager")

    def _measured(self, iteration: int) -> list[IterationRecord]:
        self.probed |= set(self.remedy.to_probe)
        return self.records(iteration)

    def _reports(self, iteration: int, reports: Sequence[StageReport]) -> Reports:
        return self.spoil(iteration, dict(enumerate(reports)))

    def feed(self, iteration: int, reports: Any) -> None:
        super().feed(iteration, reports)
        if self.remedy.stays:
            self.stays[iteration] = self.remedy.stays

    def run(self, schedule: Schedule, pairs: Iterable[Path]) -> None:
        """From now on `schedule` runs, and links between these `pairs` of workers are open."""
        self._in_force = schedule
        self.probed |= {way for a, b in pairs for way in ((a, b), (b, a))}

    def records(self, iteration: int) -> list[IterationRecord]:
        """What the workers measure of an iteration of it, the hidden part aside."""
        schedule, c = self._in_force, self.conditions(noisy=True)
        timeline = self._simulated(schedule, c)
        took = timeline.makespan * (self.truth.hidden if schedule.routes.moved else 1.0)
        self.took.append(took)
        out = []
        for worker in range(c.workers):
            record = IterationRecord(worker, iteration, 9.0, 9.0 + took)
            mine = (s for s in timeline.spans if s.stage == worker and s.op.kind.computes)
            asked = 9.0
            for s in sorted(mine, key=lambda s: s.start):
                alone = c.seconds(s.op.kind, worker)
                cpu, queued = c.on_core(worker) * alone, s.end - s.start - alone
                if self.cores is None:
                    cpu, queued = 0.0, None
                record.ops.append(OpTime(s.op, 9 + s.start, 9 + s.end, cpu, asked, 0.0, queued))
                asked = 9 + s.end
            record.cpu = sum(op.cpu for op in record.ops)
            for m in timeline.messages:
                if m.target == worker:
                    stamps = Stamps(9 + m.sent, 8.0, 9 + m.arrived, eager=True, nbytes=MESSAGE)
                    record.messages.append((m.source, m.op, stamps))
            for source in self._sources(worker):
                seconds = c.link(source, worker).delay
                stamps = Stamps(1.0, 0.5, 1.0 + seconds, eager=True, nbytes=NBYTES)
                record.probed.append((source, stamps))
            out.append(record)
        return out

    def _sources(self, worker: int) -> Iterable[int]:
        """Whose probes arrive: the neighbours' at home, and over cross paths that are open."""
        replica, stage = divmod(worker, self.stages)
        for near in (stage - 1, stage + 1):
            if 0 <= near < self.stages:
                yield replica * self.stages + near
        yield from (a for a, b in self.probed - self.deaf if b == worker)
