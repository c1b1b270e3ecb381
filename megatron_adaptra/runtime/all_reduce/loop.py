"""From what all ranks of a group report of their reductions to the all-reduce that they vote on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from megatron_adaptra.errors import AdaptraError, PlanningFailed
from megatron_adaptra.ir.buffers import Buffers
from megatron_adaptra.plan.collectives.choice import NATIVE, Choice
from megatron_adaptra.plan.collectives.figures import Figures
from megatron_adaptra.plan.collectives.selector import Chosen
from megatron_adaptra.runtime.all_reduce.decisions import (
    AllReduceDecision,
    AllReduceLog,
    sentence,
)
from megatron_adaptra.runtime.all_reduce.value import ALL_REDUCE, GroupAllReduce
from megatron_adaptra.runtime.bundle import Bundle
from megatron_adaptra.runtime.offer import Offer
from megatron_adaptra.runtime.planners import ChoiceProcess
from megatron_adaptra.runtime.trial import FIRST_BLOCK, History, Measured, Outcome, Trial
from megatron_adaptra.runtime.voted_choice import RECENT, VotedChoice
from megatron_adaptra.telemetry.all_reduce_estimate import AllReduceEstimate
from megatron_adaptra.telemetry.arrivals import Pair
from megatron_adaptra.telemetry.reduction_report import ReductionReport

WARM = 2  # iterations at first that show nothing: connections, caches, buckets
WINDOW = 5  # iterations whose median is what native and an iteration take
FEWEST = 3  # of native, before anything is chosen
LOOK = 8  # iterations between two looks at what shards take: delays count there
_SHOWN = 3  # changes that a decision has in words


@dataclass(frozen=True)
class Change:
    """What is put to the vote, as it was `chosen`, and `why`.

    `figures`: what it was chosen from; None where what is in force was given up for native. `gain`:
    share of an iteration. `planning`: seconds that the choice took. `again`: as in VotedDecision.
    """

    chosen: Chosen
    why: str
    figures: Figures | None = None
    gain: float = 0.0
    planning: float = 0.0
    again: int | None = None

    @property
    def value(self) -> GroupAllReduce:
        """What is voted on: with the ranks that must own nothing of it."""
        choice, figures = self.chosen.choice, self.figures
        late = () if figures is None or choice.native else figures.rounded().very_late
        return GroupAllReduce(choice, late)


class AllReduceLoop(VotedChoice[ReductionReport, AllReduceDecision]):
    """Estimates and chooses for one group; runs at its leader.

    Args:
        ranks: global ranks of the group; an attribute, too.
        min_gain: see `choose_all_reduce`.
        log: of decisions.
        announce: decisions go to the log of the training, too; an attribute, too.

    `offer`: what it would do about what has changed last; None until something has.
    """

    def __init__(
        self, ranks: Sequence[int], min_gain: float, log: AllReduceLog, *, announce: bool = True
    ) -> None:
        super().__init__(log, announce)
        self.ranks, self._min_gain = list(ranks), min_gain
        self.offer: Offer | None = None
        self._planner = ChoiceProcess()
        self._estimate = AllReduceEstimate(len(ranks))
        self._rows: dict[int, dict[int, ReductionReport]] = {}  # by iteration and rank
        self._ran: dict[int, Choice] = {}
        self._native: deque[Measured] = deque(maxlen=WINDOW)
        self._overlaps: deque[float] = deque(maxlen=WINDOW)
        self._periods: deque[float] = deque(maxlen=WINDOW)
        self._ours: History[Measured] = History()  # of plans
        self._not_before = 0  # the iteration from which on something may be chosen
        self._changed_for = 0  # iterations, at least
        self._nbytes, self._buffers = 0, Buffers()  # as reported last

    def begins(self, iteration: int, bundle: Bundle) -> None:
        """As for VotedThread: `bundle` is in force in `iteration`."""
        self._ran[iteration] = bundle[ALL_REDUCE].choice
        self._ran.pop(iteration - RECENT, None)

    def known(self) -> Figures | None:
        """What an all-reduce would be chosen from now, after `drain`; None until that is known."""
        if not (self._nbytes and self._periods and self._native):
            return None
        return self._figures()

    def close(self) -> None:
        """As for VotedChoice; the process that chooses ends, too."""
        super().close()
        self._planner.close()

    # On the thread.

    def _take(self, report: ReductionReport) -> None:
        recent = range(self._vote.iteration - RECENT, self._vote.iteration + RECENT)
        if report.rank not in range(len(self.ranks)) or report.iteration not in recent:
            return
        for old in [i for i in self._rows if i not in recent]:
            del self._rows[old]  # a rank does not report any more
        row = self._rows.setdefault(report.iteration, {})
        row[report.rank] = report
        if len(row) == len(self.ranks):
            del self._rows[report.iteration]
            self._on_row(report.iteration, row)
            self.seen = report.iteration

    def _on_row(self, iteration: int, row: Mapping[int, ReductionReport]) -> None:
        """All ranks have reported an iteration."""
        took = after_last_arrival(row)
        rates = self._rates(row, took)
        periods = [one.period for one in row.values() if one.period is not None]
        self._nbytes = nbytes = max(one.nbytes for one in row.values())
        buffers = [one.buffers for one in row.values()]
        self._buffers = Buffers(
            max(1, *(one.count for one in buffers)),
            last=min(nbytes, max(one.last for one in buffers)),
            gathers=max(1, *(one.gathers for one in buffers)),
            hides=median(one.hides for one in buffers),
        )
        if iteration < WARM or not periods:
            self._estimate.ports.update(rates)
            return
        self._periods.append(median(periods))
        self._overlaps.append(median(one.overlap for one in buffers))
        seen = {rank: one.seen for rank, one in row.items()}
        between = {r: one.between for r, one in row.items() if one.between is not None}
        changed = self._estimate.update(
            seen, rates, nbytes, between if len(between) == len(row) else None
        )
        ran = self._ran.get(iteration)
        if took is not None and ran is not None:
            # What a rank takes between two reductions no plan makes longer.
            measured = Measured(took, median(between.values()) if between else None)
            if ran.native:
                self._native.append(measured)
            elif not changed and not self._estimate.late_ranks.alarms():  # else it is outdated
                self._ours.add(iteration, measured)
            self.log.outcome(iteration, took)
        if (note := self._estimate.late_ranks.note()) is not None:
            self._vote.note(note)
        if not self._can_propose(iteration):
            return
        self._changed_for = self._changed_for + 1 if changed else 0
        if self._trial is not None:
            _, ours = self._ours.around(self._trial.since)
            self._trial.judge(iteration, list(self._native), ours)
            if self._trial.failed is not None:
                self._undo(iteration, self._trial.failed)
                return
        waits = iteration < self._not_before or self._backoff.blocks(iteration)
        reason = changed or self._due(iteration) or self._delays_count(iteration)
        if len(self._native) >= FEWEST and reason and not waits:
            self._choose(iteration)

    def _rates(self, row: Mapping[int, ReductionReport], took: float | None) -> dict[Pair, float]:
        """Of paths, in bytes per second, where they were measured.

        `took`: seconds from the last arrival to the end; None where that is not known.
        """
        return {(a, b): rate for b, one in row.items() for a, rate in one.rates.items()}

    def _delays_count(self, iteration: int) -> bool:
        """Whether it is time to look at delays, which change for all paths alike.

        Not while all that native waits for messages, two in each step of a ring, is less than a
        plan has to save: a search takes cores, and a training may have few.
        """
        choice = self._vote.in_force[ALL_REDUCE].choice
        if not choice.sharded or iteration % LOOK:
            return False
        steps = (choice.ranks - 1) * (self._buffers.count + self._buffers.gathers)
        waits = 2 * steps * self._estimate.late_ranks.delay()
        return not choice.native or waits >= self._min_gain * median(self._periods)

    def _undo(self, iteration: int, outcome: Outcome) -> None:
        """Back to native, and no plan for a while: what was predicted is not what comes."""
        native, ours = outcome
        why = (
            f"reductions take {1e3 * ours:.3g} ms after the last arrival, native {1e3 * native:.3g}"
        )
        choice = self._vote.in_force[ALL_REDUCE].choice.by_native()
        again = self._backoff.until
        self._propose(iteration, Change(Chosen(choice, native, native), why, again=again))

    def _figures(self) -> Figures | None:
        """None until ports are known."""
        iteration, native = median(self._periods), median(one.seconds for one in self._native)
        figures = self._estimate.figures(self._nbytes, iteration, native)
        if figures is None:
            return None
        return replace(figures, buffers=replace(self._buffers, overlap=median(self._overlaps)))

    def _choose(self, iteration: int) -> None:
        """Something is no longer as planned for: choose, and put another choice to the vote."""
        figures = self._figures()
        if figures is None:  # ports are not known yet
            return
        began, current = time.perf_counter(), self._vote.in_force[ALL_REDUCE]
        try:
            chosen = self._planner(figures, current.choice, self._min_gain)
        except PlanningFailed as error:  # what is in force stays
            self._not_before = iteration + WINDOW
            self._vote.failed("the choice of an all-reduce has failed", error)
            return
        seconds = time.perf_counter() - began
        saves = 0.0 if chosen.choice == current.choice else max(0.0, chosen.gain)
        self._offers(1 - saves / figures.iteration)
        if chosen.choice == current.choice:
            left = 0 if self._due(iteration) else WINDOW - self._changed_for
            if left > 0:  # native was measured before, in part
                self._not_before = iteration + left
            else:
                self._kept(iteration)
            return
        changes = self._estimate.changes()
        more = f"; and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        why = "; ".join(changes[:_SHOWN]) + more
        if not changes and self._again is not None:
            why = self._again[1]
        elif not changes:
            why = f"a message takes {1e3 * figures.ports.delay:.3g} ms"
        change = Change(chosen, why, figures, chosen.gain / figures.iteration, seconds)
        try:
            ALL_REDUCE.check(change.value, current)
        except AdaptraError as error:
            self._vote.note(f"an all-reduce that was chosen is not used: {error}")
            self._not_before = iteration + WINDOW
            return
        self._propose(iteration, change)

    def _offers(self, share: float) -> None:
        """An iteration would take this `share` of what it takes."""
        number = 0 if self.offer is None else self.offer.number + 1
        self.offer = Offer(number, share)

    def _kept(self, iteration: int) -> None:
        """After the reports of `iteration`, what is in force was chosen again.

        What was taken back, and gains too little just now, may gain enough later.
        """
        if self._again is not None:
            later = iteration + FIRST_BLOCK, self._again[1]
            self._again = None if self._estimate.changes() else later
        self._estimate.accept()

    def _propose(self, iteration: int, change: Change) -> None:
        """Put a `change` to the vote, after the reports of `iteration`."""
        before = self._vote.in_force[ALL_REDUCE].choice
        chosen, figures = change.chosen, change.figures
        late = () if figures is None else figures.lateness

        def decide(swap: int) -> AllReduceDecision:
            return AllReduceDecision(
                number=self.log.made, iteration=swap, detected=iteration, ranks=self.ranks,
                why=change.why, before=str(before), after=str(chosen.choice),
                choice=chosen.choice.to_json(), late_ms=[1e3 * one for one in late],
                predicted_ms=1e3 * chosen.seconds, native_ms=1e3 * chosen.native,
                gain=change.gain, planning_ms=1e3 * change.planning, again=change.again,
                figures=None if figures is None else figures.to_json(),
            )  # fmt: skip

        self._put_to_vote(iteration, Bundle({ALL_REDUCE: change.value}), decide)

    def _switched(self, decision: AllReduceDecision) -> None:
        self._estimate.accept()
        if decision.after != NATIVE:
            self._trial = Trial(decision.iteration, self._backoff)

    def _sentence(self, decision: AllReduceDecision) -> str:
        return sentence(decision)


def after_last_arrival(row: Mapping[int, ReductionReport]) -> float | None:
    """Seconds from the last arrival to the end; None where some rank does not know its own.

    A rank arrives with its last gradients, where they become ready while others are reduced. It is
    the last rank for which a reduction is shortest: no clocks are compared.
    """
    seconds = [one.exposed for one in row.values()]
    known = [one for one in seconds if one is not None]
    return min(known) if len(known) == len(seconds) else None
