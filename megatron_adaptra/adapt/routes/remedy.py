"""The remedy of replicas that have one plan: who runs a microbatch at a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import Proposed, Vote
from megatron_adaptra.adapt.planners import RouteProcess
from megatron_adaptra.adapt.routes.replanner import RouteReplanner
from megatron_adaptra.adapt.schedules.decisions import PlanDecision, Worker
from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.adapt.schedules.remedy import PlanRemedy
from megatron_adaptra.agree.bundle import LINKS, SCHEDULE, Bundle, Links
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.replica_estimate import Changed, ReplicaEstimator
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.plan.routes.reroute import ReplicaPlan


class RouteRemedy(PlanRemedy[ReplicaPlan, ReplicaConditions]):
    """A route remedy plans the schedule of all replicas, with routes between them.

    Args:
        start, log: see PlanRemedy; the start holds all replicas.
        estimator: of all workers.
        rule: by which plans are made and compared.
        workers: of all replicas, by number.
        mode: see RouteReplanner.
    """

    replanner: RouteReplanner

    def __init__(
        self,
        start: Schedule,
        estimator: ReplicaEstimator,
        rule: ReplanPolicy,
        log: DecisionLog[PlanDecision],
        workers: Sequence[Worker],
        mode: str = "auto",
    ) -> None:
        self._search = RouteProcess()
        replanner = RouteReplanner(start, estimator, rule, mode, search=self._search)
        super().__init__(start, replanner, log, workers)
        self.estimator, self.rule = estimator, rule

    def close(self) -> None:
        super().close()
        self._search.close()

    def start(self, vote: Vote) -> None:
        super().start(vote)
        self.log.record.run(
            vote.first, start=self._start.to_json(), now=vote.in_force[SCHEDULE].to_json(),
            replicas=self._start.replicas, estimators=self.estimator.settings(),
            delays=self.estimator.delays(), rule=asdict(self.rule), mode=self.replanner.mode,
        )  # fmt: skip

    def _log_outcome(self, iteration: int, reports: Mapping[int, StageReport]) -> None:
        if each := self.estimator.iteration_seconds(reports):
            self.log.outcome(iteration - 1, max(each))  # of the slowest replica

    def _estimate(
        self, iteration: int, reports: Mapping[int, StageReport], ran: Schedule | None
    ) -> Changed:
        changed = self.replanner.observe(iteration, reports, ran)
        for estimator in self.estimator.estimators:
            if estimator.unmet:
                self.vote.note(estimator.unmet)
        return changed

    def _prepare(self) -> Proposed[PlanDecision] | None:
        """Have links opened whose probes show what the paths of a plan take."""
        paths = self.replanner.to_probe
        there = self.vote.in_force[LINKS].pairs if paths else frozenset()
        missing = {(min(path), max(path)) for path in paths} - there
        return Proposed(Bundle({LINKS: Links(there | missing)})) if missing else None
