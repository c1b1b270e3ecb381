"""The remedy of one pipeline: the order and the depth of its ops."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import Vote
from megatron_adaptra.adapt.pipeline.replanner import PipelineReplanner
from megatron_adaptra.adapt.schedules.decisions import PlanDecision, Worker
from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.adapt.schedules.remedy import PlanRemedy
from megatron_adaptra.agree.bundle import SCHEDULE
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.replica_estimate import Changed
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.plan import Plan

STARVED_ITERATIONS = 5  # whose median counts
STARVED_SHARE = 0.1  # of an iteration


class PipelineRemedy(PlanRemedy[Plan, Conditions]):
    """A pipeline remedy plans the schedule of one pipeline from what its stages measure.

    Args:
        start, log: see PlanRemedy.
        estimator: of this pipeline.
        rule: by which plans are made and compared.
        workers: of this pipeline, by stage.
    """

    replanner: PipelineReplanner

    def __init__(
        self,
        start: Schedule,
        estimator: Estimator,
        rule: ReplanPolicy,
        log: DecisionLog[PlanDecision],
        workers: Sequence[Worker],
    ) -> None:
        super().__init__(start, PipelineReplanner(start, estimator, rule), log, workers)
        self.estimator, self.rule = estimator, rule
        self._starvation = Starvation(start.stages)

    def start(self, vote: Vote) -> None:
        super().start(vote)
        self.log.record.run(
            vote.first, start=self._start.to_json(), now=vote.in_force[SCHEDULE].to_json(),
            estimator=self.estimator.settings(), delays=self.estimator.delays(),
            rule=asdict(self.rule),
        )  # fmt: skip

    def _log_outcome(self, iteration: int, reports: Mapping[int, StageReport]) -> None:
        rows = list(reports.values())
        seconds = rows[0].seconds
        if seconds is not None:
            self.log.outcome(iteration - 1, seconds)
            if text := self._starvation.update(rows, seconds):
                self.vote.note(text)

    def _estimate(
        self, iteration: int, reports: Mapping[int, StageReport], ran: Schedule | None
    ) -> Changed:
        changed = self.replanner.observe(iteration, list(reports.values()), ran)
        if self.estimator.unmet:
            self.vote.note(self.estimator.unmet)
        return changed


class Starvation:
    """A check finds which of so many `stages` has a GPU that waits most for its late host.

    No schedule helps against that.
    """

    def __init__(self, stages: int) -> None:
        self._shares: list[deque[float]] = [deque(maxlen=STARVED_ITERATIONS) for _ in range(stages)]
        self._reported = False

    def update(self, reports: Sequence[StageReport], seconds: float) -> str:
        """Take an iteration's `reports`, one per stage; return a line to log, once, else "".

        `seconds`: those that an iteration takes.
        """
        for shares, report in zip(self._shares, reports, strict=True):
            shares.append(report.starved / seconds)
        typical = [median(shares) for shares in self._shares]
        worst = max(range(len(typical)), key=typical.__getitem__)
        few = len(self._shares[0]) < STARVED_ITERATIONS
        if self._reported or few or typical[worst] < STARVED_SHARE:
            return ""
        self._reported = True
        return (
            f"the GPU of stage {worst} has nothing to do for {typical[worst]:.0%} of an iteration "
            "because its host launches too late; no schedule helps against that"
        )
