"""A training without threads or a clock, of which a remedy sees what its workers report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic

from megatron_adaptra.adapt.pipeline.remedy import PipelineRemedy
from megatron_adaptra.adapt.routes.remedy import RouteRemedy
from megatron_adaptra.adapt.schedules.policy import Change, K, P
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.iteration_record import IterationRecord
from megatron_adaptra.measure.report import StageReport


class FedJob(Generic[P, K]):
    """Runs the plans of a `remedy`: each comes into force two iterations after its proposal.

    What takes how long is its `truth`, a dataclass of the subclass; `_measured` is what its workers
    measure of an iteration.

    `ran`: the schedule of every iteration; `changes`: what was proposed, by iteration; `refused`:
    so many proposals do not come into force.
    """

    truth: Any

    def __init__(self, start: Schedule, remedy: PipelineRemedy | RouteRemedy) -> None:
        self.start, self.remedy = start, remedy
        self.ran: list[Schedule] = []
        self.changes: dict[int, Change[P, K]] = {}
        self.refused = 0
        self._in_force = start
        self._due: tuple[int, Change[P, K]] | None = None
        self._before: list[IterationRecord] | None = None

    def _measured(self, iteration: int) -> list[IterationRecord]:
        raise NotImplementedError

    def _reports(self, iteration: int, reports: Sequence[StageReport]) -> Any:
        """As the remedy wants them."""
        return reports

    def train(self, iterations: int, **truth: object) -> list[Schedule]:
        """The schedules that ran; `truth`: what is different from now on."""
        self.truth = replace(self.truth, **truth)
        for iteration in range(len(self.ran), len(self.ran) + iterations):
            self.close_if_due(iteration)
            now = self._measured(iteration)
            before = self._before or [None] * len(now)
            reports = [r.report(b) for r, b in zip(now, before, strict=True)]
            self.feed(iteration, self._reports(iteration, reports))
            self._before = now
        return self.ran[-iterations:]

    def close_if_due(self, iteration: int) -> None:
        """The boundary before an iteration: what was proposed comes into force, or does not."""
        if self._due is None or iteration < self._due[0]:
            return
        _, change = self._due
        self._due = None
        if self.refused:
            self.refused -= 1
            self.remedy._remember_again(change)
        else:
            self._in_force = change.plan.schedule
            self.remedy.swapped(change, iteration)

    def feed(self, iteration: int, reports: Any) -> None:
        """An iteration is over: the remedy gets its reports, and may propose a plan."""
        ran = self.ran[-1] if self.ran else None
        self.ran.append(self._in_force)
        rows = reports if isinstance(reports, Mapping) else dict(enumerate(reports))
        changed = self.remedy.measure(iteration, rows, ran)
        change = self.remedy.plan(iteration, changed, self._in_force, self._due is None)
        if change is not None:
            self._due = iteration + 2, change
            self.changes[iteration] = change

    @property
    def swaps(self) -> list[int]:
        """The first iteration of each plan but the first."""
        return [i for i in range(1, len(self.ran)) if not self.ran[i].same_as(self.ran[i - 1])]

    @property
    def reasons(self) -> list[tuple[int, str]]:
        """Of all changes, by iteration."""
        return [(iteration, change.why) for iteration, change in self.changes.items()]
