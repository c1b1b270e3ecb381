"""The replan loop of replicas that have one plan: routes found, opened, tried and undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import Path, worker_name
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.reroute import ReplicaPlan
from megatron_adaptra.runtime.agreement import Proposal
from megatron_adaptra.runtime.bundle import LINKS, SCHEDULE, Bundle, Links, scheduled
from megatron_adaptra.runtime.change import ReplicaChange
from megatron_adaptra.runtime.decisions import Decision, DecisionLog, LinkChange, LinkEnd, Worker
from megatron_adaptra.runtime.planning_thread import PlanningThread, Vote
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.runtime.replica_replanner import ReplicaReplanner
from megatron_adaptra.telemetry.replica_estimate import ReplicaEstimator
from megatron_adaptra.telemetry.report import StageReport


class ReplicaLoop(PlanningThread[ReplicaChange]):
    """Estimates and plans for all replicas.

    Reports are of workers: so is their `stage`, and so are sources of messages.

    Args:
        start, log, announce: see PlanningThread; the start holds all replicas.
        estimator: of all workers; only the planning thread changes it once `start` is called.
        rule: by which plans are made and compared.
        workers: of all replicas, by number.
        mode: see ReplicaReplanner.
    """

    def __init__(
        self,
        start: Schedule,
        estimator: ReplicaEstimator,
        rule: ReplanPolicy,
        log: DecisionLog,
        workers: Sequence[Worker],
        *,
        mode: str = "auto",
        announce: bool = False,
    ) -> None:
        super().__init__(start, log, workers, announce=announce)
        self.replanner = ReplicaReplanner(start, estimator, rule, mode)
        self.estimator, self.rule = estimator, rule
        self._opening: Proposal | None = None  # of links to other replicas

    def limit(self, mode: str) -> None:
        """From now on plans do no more than this `mode` allows, see ReplicaReplanner."""
        self.replanner.mode = mode

    def evaluate(self, schedule: Schedule, conditions: ReplicaConditions) -> ReplicaPlan:
        """What an iteration of a `schedule` takes under `conditions`, as plans are compared."""
        return self.replanner.simulated(schedule, conditions)

    def _begin(self, vote: Vote) -> None:
        self.log.record.run(
            vote.first, start=self._start.to_json(), now=vote.in_force[SCHEDULE].to_json(),
            replicas=self._start.replicas, estimators=self.estimator.settings(),
            delays=self.estimator.delays(), rule=asdict(self.rule), mode=self.replanner.mode,
        )  # fmt: skip

    def state(self) -> dict[str, float]:
        """As for PlanningThread, of the links within replicas, by workers."""
        stages, found = self._start.stages, {}
        for replica, estimator in enumerate(self.estimator.estimators):
            for link, seconds in estimator.state().items():
                a, b = (replica * stages + int(stage) for stage in link.split(">"))
                found[f"{a}>{b}"] = seconds
        return found

    def _measured(self) -> tuple[dict[str, float], list[str]]:
        return self.estimator.delays(), self.estimator.alarms()

    def _on_reports(self, iteration: int, reports: Mapping[int, StageReport]) -> None:
        rows = of_stages(reports, self._start.stages)
        each = [r.seconds for r in rows.values() if r.stage == 0 and r.seconds is not None]
        if each:
            self.log.record_outcome(iteration - 1, max(each))  # of the slowest replica
        if iteration == self._vote.first:
            return  # allocators and caches warm up
        ran = self._ran.pop(iteration - 1, None)
        changed = self.replanner.observe(iteration, rows, ran)
        for estimator in self.estimator.estimators:
            if estimator.unmet:
                self._vote.note(estimator.unmet)
        self._keep_delays(iteration)
        if ran is not None and self.replanner.predicted is not None:
            self._refresh_prediction(iteration, ran, self.replanner.predicted)
        in_force, possible = self._vote.in_force, self._vote.can_propose(iteration)
        change = self.replanner.propose(iteration, changed, in_force[SCHEDULE], possible)
        if self.replanner.stays:
            self._vote.note(self.replanner.stays)
        if change is not None:
            if not self._propose(iteration, change):
                self.replanner.failed(change)
        elif possible and self.replanner.to_probe:
            self._open(iteration, in_force[LINKS], self.replanner.to_probe)

    def _open(self, iteration: int, links: Links, paths: Sequence[Path]) -> None:
        """Have links opened, whose probes show what the `paths` of a plan take."""
        pairs = links.pairs | {(min(path), max(path)) for path in paths}
        if pairs != links.pairs:
            self._opening = self._vote.propose(iteration, Bundle({LINKS: Links(pairs)}))

    def _propose(self, iteration: int, change: ReplicaChange) -> bool:
        """Put a change to the vote, and log why; False when that is not possible now."""
        before, plan = self._vote.in_force[SCHEDULE], change.plan
        stock = self.replanner.stock()
        proposal = self._vote.propose(iteration, scheduled(plan.schedule))
        if proposal is None:
            return False
        decision = Decision(
            number=self.log.made,
            iteration=proposal.swap,
            detected=iteration,
            kinds=proposal.bundle.names,
            links=[self._link_change(path, old, change) for path, old in change.links.items()],
            why=change.why,
            warmup_before=list(before.warmup),
            warmup_after=list(plan.schedule.warmup),
            predicted_ms=1e3 * plan.predicted,
            predicted_without_ms=1e3 * change.current.predicted,
            stock=stock,
            lower_bound_ms=1e3 * plan.lower_bound,
            planning_ms=1e3 * change.seconds,
            digest=plan.schedule.digest(),
            plan=plan.schedule.text(),
            conditions=change.conditions.to_json(),
        )
        self._pending = proposal, decision, change
        self.log.add(decision)
        return True

    def _link_change(self, path: Path, before: float, change: ReplicaChange) -> LinkChange:
        stages = self._start.stages
        ends = [
            LinkEnd(
                worker % stages, *self._workers[worker],
                self._through.get(worker, {}).get(other, ""), worker_name(worker, stages),
            )
            for worker, other in (path, path[::-1])
        ]  # fmt: skip
        now, wire = change.conditions.link(*path), change.conditions.wire(*path)
        return LinkChange(
            ends[0],
            ends[1],
            delay_before_ms=1e3 * before,
            delay_ms=1e3 * now.delay,
            wire_ms=1e3 * wire,
            bandwidth=now.bandwidth if wire else None,
        )

    def _over(self, change: ReplicaChange, proposal: Proposal) -> None:
        if proposal.committed:
            self.replanner.swapped(change, proposal.swap)
        else:
            self.replanner.failed(change)


def of_stages(reports: Mapping[int, StageReport], stages: int) -> dict[int, StageReport]:
    """The `reports` of workers, by number, as those of the `stages` of their replica."""
    return {w: replace(report, stage=w % stages) for w, report in reports.items()}
