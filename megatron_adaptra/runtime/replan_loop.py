"""The replan loop: from the reports of all stages to a proposal, and to what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan import Plan
from megatron_adaptra.runtime.agreement import Proposal
from megatron_adaptra.runtime.bundle import SCHEDULE, scheduled
from megatron_adaptra.runtime.change import PipelineChange
from megatron_adaptra.runtime.decisions import Decision, DecisionLog, LinkChange, LinkEnd, Worker
from megatron_adaptra.runtime.planning_thread import PlanningThread, Vote
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.runtime.replanner import Link, Replanner
from megatron_adaptra.telemetry.estimate import Estimator
from megatron_adaptra.telemetry.report import StageReport
from megatron_adaptra.telemetry.starvation import Starvation


class ReplanLoop(PlanningThread[PipelineChange]):
    """Estimates and plans for one pipeline.

    Args:
        start, log, announce: see PlanningThread.
        estimator: of this pipeline; only the planning thread changes it once `start` is called.
        rule: by which plans are made and compared.
        workers: of this pipeline, by stage.
    """

    def __init__(
        self,
        start: Schedule,
        estimator: Estimator,
        rule: ReplanPolicy,
        log: DecisionLog,
        workers: Sequence[Worker],
        *,
        announce: bool = False,
    ) -> None:
        super().__init__(start, log, workers, announce=announce)
        self.replanner = Replanner(start, estimator, rule)
        self.estimator, self.rule = estimator, rule
        self._starvation = Starvation(start.stages)

    def state(self) -> dict[str, float]:
        """As for PlanningThread."""
        return self.estimator.state()

    def evaluate(self, schedule: Schedule, conditions: Conditions) -> Plan:
        """What an iteration of a `schedule` takes under `conditions`, as plans are compared."""
        return self.rule.evaluate(schedule, conditions)

    def _begin(self, vote: Vote) -> None:
        self.log.record.run(
            vote.first, start=self._start.to_json(), now=vote.in_force[SCHEDULE].to_json(),
            estimator=self.estimator.settings(), delays=self.estimator.delays(),
            rule=asdict(self.rule),
        )  # fmt: skip

    def _measured(self) -> tuple[dict[str, float], list[str]]:
        return self.estimator.delays(), self.estimator.alarms()

    def _on_reports(self, iteration: int, reports: Mapping[int, StageReport]) -> None:
        rows = list(reports.values())
        seconds = rows[0].seconds  # of the iteration before
        if seconds is not None:
            self.log.record_outcome(iteration - 1, seconds)
            if text := self._starvation.update(rows, seconds):
                self._vote.note(text)
        if iteration == self._vote.first:
            return  # allocators and caches warm up
        ran = self._ran.pop(iteration - 1, None)
        changed = self.replanner.observe(iteration, rows, ran)
        if self.estimator.unmet:
            self._vote.note(self.estimator.unmet)
        self._keep_delays(iteration)
        if ran is not None and self.replanner.predicted is not None:
            self._refresh_prediction(iteration, ran, self.replanner.predicted)
        in_force, possible = self._vote.in_force[SCHEDULE], self._vote.can_propose(iteration)
        change = self.replanner.propose(iteration, changed, in_force, possible)
        if self.replanner.stays:
            self._vote.note(self.replanner.stays)
        if change is not None and not self._propose(iteration, change):
            self.replanner.failed(change)

    def _propose(self, iteration: int, change: PipelineChange) -> bool:
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
            links=[self._link_change(link, old, change) for link, old in change.links.items()],
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

    def _link_change(self, link: Link, before: float, change: PipelineChange) -> LinkChange:
        ends = [
            LinkEnd(stage, *self._workers[stage], self._through.get(stage, {}).get(other, ""))
            for stage, other in (link, link[::-1])
        ]
        now, wire = change.conditions.link(*link), change.conditions.wire(*link)
        return LinkChange(
            ends[0],
            ends[1],
            delay_before_ms=1e3 * before,
            delay_ms=1e3 * now.delay,
            wire_ms=1e3 * wire,
            bandwidth=now.bandwidth if wire else None,
        )

    def _over(self, change: PipelineChange, proposal: Proposal) -> None:
        if proposal.committed:
            self.replanner.swapped(change, proposal.swap)
        else:
            self.replanner.failed(change)
