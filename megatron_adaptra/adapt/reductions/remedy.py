"""The remedy of a data-parallel group: it chooses the all-reduce that the ranks vote on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import RECENT_ITERATIONS, Offer, Proposed, Remedy
from megatron_adaptra.adapt.planning_process import PlanningProcess
from megatron_adaptra.adapt.reductions.decisions import ReductionDecision, ranks_in_words
from megatron_adaptra.adapt.trial import FIRST_BLOCK, Attempt, History, Measured, Outcome
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.agree.reductions import ALL_REDUCE, GroupReduction
from megatron_adaptra.base.errors import AdaptraError, BadInput, PlanningFailed
from megatron_adaptra.diagnose.late import LateDiagnosis
from megatron_adaptra.measure.all_reduce_estimate import AllReduceEstimate
from megatron_adaptra.measure.arrivals import Pair
from megatron_adaptra.measure.reduction_report import ReductionReport
from megatron_adaptra.plan.reductions.choice import NATIVE, Choice
from megatron_adaptra.plan.reductions.figures import Buffers, Figures
from megatron_adaptra.plan.reductions.selector import Chosen
from megatron_adaptra.plan.server import choose

WARM = 2  # iterations at first that show nothing: connections, caches, buckets
WINDOW = 5  # iterations whose median is what native and an iteration take
FEWEST = 3  # of native, before anything is chosen
LOOK = 8  # iterations between two looks at what shards take: delays count there
QUIET = 2 * WINDOW  # iterations without another line, where reductions never change
_SHOWN = 3  # changes that a decision has in words


class ChoiceProcess(PlanningProcess):
    """A choice process chooses all-reduces; see PlanningProcess."""

    def __call__(self, figures: Figures, in_force: Choice, min_gain: float) -> Chosen:
        """Choose as `plan.server.choose` does, and raise BadInput where it does.

        The process starts with the first choice that needs a search. Raises PlanningFailed, too.
        """
        if not (in_force.sharded or figures.rounded().stands_out):
            return choose(figures, in_force, min_gain)  # native, at once

        def read(answer: dict[str, Any]) -> Chosen:
            found = Chosen.from_json({key: answer[key] for key in answer if key != "number"})
            if (found.choice.ranks, found.choice.sharded) != (in_force.ranks, in_force.sharded):
                raise BadInput("choice", str(found.choice), f"in place of {in_force}")
            return found

        request = {
            "figures": figures.to_json(), "in_force": in_force.to_json(), "min_gain": min_gain,
        }  # fmt: skip
        return self.ask(request, read)


class ReductionRemedy(Remedy[ReductionReport, ReductionDecision]):
    """A reduction remedy chooses how one data-parallel group adds up its gradients.

    Args:
        ranks: global ranks of the group; an attribute, too.
        min_gain: see `choose_all_reduce`.
        log: of decisions.
        stays: where gradients are, in words, if a reduction never changes: then the log gets, for
            each rank that comes late, what another reduction would save. All ports then count as
            alike, at the rate of a ring by torch's backend. None to change reductions.
        diagnosis: finds who comes late; None where nobody wants to know.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        min_gain: float,
        log: DecisionLog[ReductionDecision],
        stays: str | None = None,
        diagnosis: LateDiagnosis | None = None,
    ) -> None:
        super().__init__(len(ranks), log)
        self.ranks, self._min_gain, self._stays = list(ranks), min_gain, stays
        self._diagnosis = diagnosis
        self._planner = ChoiceProcess()
        self._attempt = Attempt()
        self._estimate = AllReduceEstimate(len(ranks))
        self._ran: dict[int, Choice] = {}
        self._native: deque[Measured] = deque(maxlen=WINDOW)
        self._overlaps: deque[float] = deque(maxlen=WINDOW)
        self._periods: deque[float] = deque(maxlen=WINDOW)
        self._ours: History[Measured] = History()  # of plans
        self._not_before = 0  # the iteration from which on something may be chosen
        self._changed_for = 0  # iterations, at least
        self._nbytes, self._buffers = 0, Buffers()  # as reported last

    def begins(self, iteration: int, bundle: Bundle) -> None:
        self._ran[iteration] = bundle[ALL_REDUCE].choice
        self._ran.pop(iteration - RECENT_ITERATIONS, None)

    def known(self) -> Figures | None:
        """Return the figures for a choice now; None until they are known. Call after `drain`."""
        if not (self._nbytes and self._periods and self._native):
            return None
        return self._figures()

    def close(self) -> None:
        super().close()
        self._planner.close()

    def sender(self, report: ReductionReport) -> int:
        return report.rank

    def observe(
        self, iteration: int, row: Mapping[int, ReductionReport]
    ) -> Proposed[ReductionDecision] | None:
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
            return None
        self._periods.append(median(periods))
        self._overlaps.append(median(one.overlap for one in buffers))
        seen = {rank: one.seen for rank, one in row.items()}
        between = {r: one.between for r, one in row.items() if one.between is not None}
        changed = self._estimate.update(
            seen, rates, nbytes, between if len(between) == len(row) else None
        )
        if self._diagnosis is not None:
            queued = {rank: one.queued or 0.0 for rank, one in row.items()}
            self._diagnosis.update(iteration, self._estimate.late_ranks, self._periods[-1], queued)
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
            self.vote.note(note)
        if not self.vote.can_propose(iteration):
            return None
        self._changed_for = self._changed_for + 1 if changed else 0
        attempt = self._attempt
        if (trial := attempt.trial) is not None:
            trial.judge(iteration, list(self._native), self._ours.around(trial.since)[1])
            if trial.failed is not None:
                return self._undo(trial.failed)
        waits = iteration < self._not_before or attempt.backoff.blocks(iteration)
        reason = changed or attempt.due(iteration)
        reason = reason or (not attempt.held and self._delays_count(iteration))
        if len(self._native) < FEWEST or waits or not reason:
            return None
        return self._choose(iteration)

    def _rates(self, row: Mapping[int, ReductionReport], took: float | None) -> dict[Pair, float]:
        """Return the rate of each path, in bytes per second, where it was measured.

        `took`: seconds from the last arrival to the end; None where that is not known.
        """
        if self._stays is None:
            return {(a, b): rate for b, one in row.items() for a, rate in one.rates.items()}
        if not took:
            return {}
        count, turns = len(row), 1 if self._sharded else 2
        # At least as much: what has not ended when the last buffer is ready may be some of it.
        speed = max(
            max(one.nbytes / (one.buffers.overlap + took), one.buffers.last / took)
            for one in row.values()
        )
        rate = turns * (count - 1) / count * speed
        return {(a, b): rate for a in range(count) for b in range(count) if a != b}

    @property
    def _sharded(self) -> bool:
        return self.vote.in_force[ALL_REDUCE].choice.sharded

    def _delays_count(self, iteration: int) -> bool:
        """Return whether to look at delays in `iteration`: these change for all paths alike.

        False while native waits for messages, two in each step of a ring, for less time than a plan
        has to save: a search takes cores, and a training may have few.
        """
        choice = self.vote.in_force[ALL_REDUCE].choice
        if self._stays is not None or not choice.sharded or iteration % LOOK:
            return False
        steps = (choice.ranks - 1) * (self._buffers.count + self._buffers.gathers)
        waits = 2 * steps * self._estimate.late_ranks.delay()
        return not choice.native or waits >= self._min_gain * median(self._periods)

    def _undo(self, outcome: Outcome) -> Proposed[ReductionDecision]:
        """Propose native again, and block plans for a while: this one is slower than predicted."""
        native, ours = outcome
        why = (
            f"reductions take {1e3 * ours:.3g} ms after the last arrival, native {1e3 * native:.3g}"
        )
        return self._by_native(native, why, again=self._attempt.backoff.until)

    def _by_native(self, native: float, why: str, **figures: Any) -> Proposed[ReductionDecision]:
        """Propose native, which takes `native` seconds. `figures`: more of its decision."""
        back = GroupReduction(self.vote.in_force[ALL_REDUCE].choice.by_native())
        return self._proposed(back, Chosen(back.choice, native, native), why, **figures)

    def back(self, why: str) -> Proposed[ReductionDecision] | None:
        if self.vote.in_force[ALL_REDUCE].choice.native or not self._native:
            return None
        self._attempt.hold(self.log.last)
        return self._by_native(median(one.seconds for one in self._native), why)

    def held(self, decision: ReductionDecision) -> None:
        self._attempt.hold(decision)
        self._estimate.accept()

    def resume(self) -> None:
        self._attempt.resume()

    def _figures(self) -> Figures | None:
        """Return the figures for a choice now; None until ports are known."""
        iteration, native = median(self._periods), median(one.seconds for one in self._native)
        figures = self._estimate.figures(self._nbytes, iteration, native)
        if figures is None:
            return None
        return replace(figures, buffers=replace(self._buffers, overlap=median(self._overlaps)))

    def _choose(self, iteration: int) -> Proposed[ReductionDecision] | None:
        """Choose anew: something is no longer as planned for."""
        if self._stays is not None and not self._estimate.late_ranks.changes(self.ranks):
            self._estimate.accept()  # ports pass what the backend makes of them
            return None
        if self._stays is not None and self._sharded:
            self._offers(1.0)
            self._advise(iteration, "no other reduction would help: of shards none can")
            return None
        figures = self._figures()
        if figures is None:  # ports are not known yet
            return None
        began, current = time.perf_counter(), self.vote.in_force[ALL_REDUCE]
        try:
            chosen = self._planner(figures, current.choice, self._min_gain)
        except PlanningFailed as error:  # what is in force stays
            self._not_before = iteration + WINDOW
            self.vote.failed("the choice of an all-reduce has failed", error)
            return None
        seconds = time.perf_counter() - began
        saves = 0.0 if chosen.choice == current.choice else max(0.0, chosen.gain)
        self._offers(1 - saves / figures.iteration)
        attempt = self._attempt
        if chosen.choice == current.choice:
            left = 0 if attempt.due(iteration) else WINDOW - self._changed_for
            if left > 0:  # native was measured before, in part
                self._not_before = iteration + left
            else:
                self._kept(iteration)
            return None
        changes = self._estimate.changes(self.ranks)
        more = f"; and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        why = "; ".join(changes[:_SHOWN]) + more
        if not changes and attempt.again is not None:
            why = attempt.again[1]
        elif not changes:
            why = f"a message takes {1e3 * figures.ports.delay:.3g} ms"
        # Late ranks must own no part of it.
        late = () if chosen.choice.native else figures.rounded().very_late
        value, gain = GroupReduction(chosen.choice, late), chosen.gain / figures.iteration
        try:
            ALL_REDUCE.check(value, current)
        except AdaptraError as error:
            self.vote.note(f"an all-reduce that was chosen is not used: {error}")
            self._not_before = iteration + WINDOW
            return None
        if self._stays is not None:
            share = f"would save about {100 * gain:.0f} % of an iteration"
            self._advise(iteration, f"{chosen.choice} {share}")
            return None
        return self._proposed(
            value, chosen, why, gain=gain, planning_ms=1e3 * seconds, figures=figures.to_json(),
            late_ms=[1e3 * one for one in figures.lateness],
        )  # fmt: skip

    def _advise(self, iteration: int, about: str) -> None:
        """Log what is known `about` other reductions, after the reports of `iteration`."""
        changes = "; ".join(self._estimate.late_ranks.changes(self.ranks))
        whose = ranks_in_words(self.ranks)
        self.vote.note(f"gradients of {whose} stay {self._stays}: {changes}; {about}")
        self._estimate.accept()
        self._not_before = iteration + QUIET

    def _offers(self, share: float) -> None:
        """Offer a remedy that leaves this `share` of an iteration."""
        number = 0 if self.offer is None else self.offer.number + 1
        self.offer = Offer(number, share if self._stays is None else 1.0)

    def _kept(self, iteration: int) -> None:
        """Accept that what is in force was chosen again after the reports of `iteration`.

        A plan that was taken back, and gains too little just now, may gain enough later.
        """
        if self._stays is not None:
            self._advise(iteration, "no other reduction would help: none would save enough")
        if (again := self._attempt.again) is not None:
            later = iteration + FIRST_BLOCK, again[1]
            self._attempt.again = None if self._estimate.changes(self.ranks) else later
        self._estimate.accept()

    def _proposed(
        self, value: GroupReduction, chosen: Chosen, why: str, **figures: Any
    ) -> Proposed[ReductionDecision]:
        """Propose a `value`, as it was `chosen`. `figures`: more of its decision."""
        decision = ReductionDecision(
            ranks=self.ranks, why=why, before=str(self.vote.in_force[ALL_REDUCE].choice),
            after=str(chosen.choice), choice=chosen.choice.to_json(),
            predicted_ms=1e3 * chosen.seconds, native_ms=1e3 * chosen.native,
            answers=[] if self._diagnosis is None else self._diagnosis.answers(), **figures,
        )  # fmt: skip
        return Proposed(Bundle({ALL_REDUCE: value}), decision)

    def switched(self, decision: ReductionDecision, before: ReductionDecision | None) -> None:
        self._estimate.accept()
        self._attempt.switched(decision, before, tried=decision.after != NATIVE)


def after_last_arrival(row: Mapping[int, ReductionReport]) -> float | None:
    """Return the seconds from the last arrival to the end; None where a rank has not measured.

    A rank arrives with its last gradients, where they become ready while others are reduced. It is
    the last rank for which a reduction is shortest: no clocks are compared.
    """
    seconds = [one.exposed for one in row.values()]
    known = [one for one in seconds if one is not None]
    return min(known) if len(known) == len(seconds) else None
