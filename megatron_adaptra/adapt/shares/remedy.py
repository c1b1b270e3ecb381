"""The remedy of unequal replicas: it chooses how many microbatches each of them runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar

from megatron_adaptra.adapt.counts_vote import SYNC
from megatron_adaptra.adapt.log import Decision, DecisionLog
from megatron_adaptra.adapt.loop import Offers, Proposed, Remedy, Vote
from megatron_adaptra.adapt.shares.ladder import PATIENCE, Offered, cheaper_remedies, known_remedies
from megatron_adaptra.adapt.trial import Attempt, History, Measured, Outcome, Trial, in_words
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.diagnose.replicas import ReplicaDiagnosis
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.measure.replica_speed import ReplicaRow, ReplicaSpeeds
from megatron_adaptra.plan.ladder import FULL, SHARES, Ladder, climb, ladder_in_words
from megatron_adaptra.plan.shares.counts import SharePlan, share_by_speed, shares_in_words

WARM = 2  # iterations at first that show nothing: caches, connections, compilation
WINDOW = 5  # iterations whose median is what an iteration takes
AGAIN = 12  # iterations after which counts that would have gained too little are looked at again


@dataclass(kw_only=True)
class ShareDecision(Decision):
    """A share decision changes how many microbatches each replica runs.

    An iteration is measured from its beginning to that of the next one.

    Args:
        microbatches: of a replica in stock.
        before, after: by replica, how many it ran and runs now.
        slow: replicas that are slow.
        microbatch_ms, outside_ms: by replica, what a microbatch takes, and what does not depend on
            their number. Empty where the decision takes back what was slower.
        predicted_ms: an iteration with these counts.
        full_ms: an iteration in which each replica runs as many as in stock; where the decision
            takes back what was slower, an iteration as it is.
        lower_bound_ms: no counts take less; None where the decision takes back what was slower.
        gain: share of `full_ms` that it is expected to save.
        cheaper: other remedies, the cheapest first, as Remedy.to_json has them.
        answers: names of the open findings that it is for.
    """

    KIND: ClassVar[str] = "sync"
    ABOUT: ClassVar[str] = "decisions on shares of microbatches"

    microbatches: int
    before: list[int]
    after: list[int]
    slow: list[int]
    microbatch_ms: list[float] = field(default_factory=list)
    outside_ms: list[float] = field(default_factory=list)
    predicted_ms: float
    full_ms: float
    lower_bound_ms: float | None
    gain: float
    cheaper: list[dict[str, Any]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def sentence(self) -> str:
        words = shares_in_words(SyncPlan(self.microbatches, tuple(self.after)))
        text = f"from iteration {self.iteration + 1} on, {words}: {self.why}"
        if self.again is not None:
            return text + in_words(self.again)
        if self.after == [self.microbatches] * len(self.after):
            return text
        text += f"; an iteration is expected to take {self.predicted_ms:.4g} ms"
        text += f", with {self.microbatches} each {self.full_ms:.4g}"
        known = [one for one in self.cheaper if one["leaves_ms"] is not None]
        if known:
            best = min(known, key=lambda one: float(one["leaves_ms"]))
            text += f"; {best['remedy']} would leave {best['leaves_ms']:.4g}"
        return text

    def subject(self) -> str:
        return f"the counts of microbatches of iteration {self.iteration + 1}: an iteration takes"


class ShareRemedy(Remedy[ReplicaRow, ShareDecision]):
    """A share remedy chooses how many microbatches each replica of a job runs.

    It runs at the job's first rank, which reports the rows of all replicas.

    Counts are chosen anew only when the set of slow replicas changes, once at most for each such
    change. Counts that would have gained too little are looked at again while the same replicas are
    slow, as other programs may have made iterations long for a while; so are counts that were taken
    back because iterations took longer with them.

    Args:
        replicas: how many there are.
        min_gain: share of an iteration that counts have to save over equal ones.
        log: of decisions.
        stages: of each replica's pipeline.
        offers: of cheaper remedies that are allowed, and taken where they are enough (`auto`); None
            to share out microbatches whenever that gains enough (`share`).
        diagnosis: finds which replicas are slow; None where nobody wants to know.
    """

    def __init__(
        self,
        replicas: int,
        min_gain: float,
        log: DecisionLog[ShareDecision],
        stages: int = 1,
        offers: Offers | None = None,
        diagnosis: ReplicaDiagnosis | None = None,
    ) -> None:
        super().__init__(1, log)
        self._replicas, self._min_gain, self._stages = replicas, min_gain, stages
        self._offered = None if offers is None else Offered(offers)
        self._diagnosis = diagnosis
        self._attempt = Attempt()
        self._since: int | None = None  # the iteration whose reports have shown other slow ones
        self._left_to: int | None = None  # that of the change which was left to a cheaper remedy
        self._runs: SyncPlan | None = None  # set by the training thread
        self._microbatches = 0  # of a replica in stock
        self._speeds: ReplicaSpeeds  # from the first row on
        self._warm = WARM
        self._rows: History[ReplicaRow] = History()  # of iterations whose seconds are known
        self._rests: deque[float] = deque(maxlen=WINDOW)  # seconds after the last replica has run
        self._usual: deque[float] = deque(maxlen=WINDOW)  # the same while no replica is slow

    def runs(self, plan: SyncPlan) -> None:
        """Take note that all ranks run `plan` in the iteration that begins (training thread)."""
        self._runs = plan

    # On the thread.

    def start(self, vote: Vote) -> None:
        super().start(vote)
        self.log.record.run(vote.first, replicas=self._replicas, stages=self._stages)

    def _begin_anew(self, microbatches: int) -> None:
        """Begin anew with so many `microbatches` per replica: older measurements do not count."""
        self.log.settle()
        self._speeds = ReplicaSpeeds(self._replicas, self._stages - 1)
        self._microbatches, self._warm, self._since = microbatches, WARM, None
        self._attempt.forget()
        self._rests.clear()
        self._usual.clear()

    def sender(self, report: ReplicaRow) -> int:
        return 0

    def observe(
        self, iteration: int, reports: Mapping[int, ReplicaRow]
    ) -> Proposed[ShareDecision] | None:
        row = reports[0]
        microbatches = sum(row.microbatches) // len(row.microbatches)
        if microbatches != self._microbatches:
            self._begin_anew(microbatches)
        if row.took is not None:
            self.log.record.replicas(iteration, row.microbatches, row.seconds, row.took)
            self.log.outcome(iteration, row.took)
        if self._warm:
            self._warm -= 1
            return None
        if microbatches == 1:
            self.vote.note(
                "each replica runs one microbatch: shares of microbatches cannot help a slow one"
            )
            return None
        samples = enumerate(zip(row.seconds, row.microbatches, strict=True))
        changed = self._speeds.update(dict(samples))
        if self._diagnosis is not None:
            self._diagnosis.update(row, self._speeds)
        self._take_rest(row)
        if not changed:
            self._since = None
            if self._offered is not None:
                self._offered.remember()
        elif self._since is None:
            self._since = iteration
        current = self._runs
        if (
            not self.vote.can_propose(iteration)
            or current is None
            or current.microbatches != microbatches
            or current.counts != row.microbatches
        ):
            return None  # what is in force has not been measured yet
        if (note := self._speeds.note()) is not None:
            self.vote.note(note)
        attempt = self._attempt
        if (trial := attempt.trial) and (failed := self._judged(iteration, trial, changed)):
            return self._undo(current, failed)
        return self._choose(row, current) if changed or attempt.due(iteration) else None

    def _take_rest(self, row: ReplicaRow) -> None:
        """Keep what the iteration has taken, and how much of that beyond its slowest replica."""
        if row.took is None:
            return
        self._rests.append(max(0.0, row.took - max(row.seconds)))
        alarms = self._speeds.alarms()
        if self._since is None and not (self._speeds.slow() or alarms):
            self._usual.append(self._rests[-1])
        trial = self._attempt.trial
        if trial is None or row.iteration < trial.since or not alarms:
            self._rows.add(row.iteration, row)

    def _judged(self, iteration: int, trial: Trial, changed: bool) -> Outcome | None:
        """Return the outcome of a `trial` of counts that has failed; None else.

        `changed`: other replicas are slow now, so that a comparison shows nothing of the counts.
        """
        if changed and trial.failed is None:
            self._attempt.trial = None
            return None
        before, after = self._rows.around(trial.since)
        trial.judge(iteration, self._measured(before), self._measured(after))
        return trial.failed

    def _measured(self, rows: Sequence[ReplicaRow]) -> list[Measured]:
        """Return iterations, with a microbatch's seconds on replicas of no more work as control.

        Replicas that run more of others' microbatches than before the last decision are left out,
        and so are slow ones if there are others.
        """
        decision = self.log.last
        assert decision is not None
        pairs = enumerate(zip(decision.before, decision.after, strict=True))
        same = [r for r, (old, new) in pairs if new <= max(old, decision.microbatches)]
        control = [r for r in same if r not in decision.slow] or same
        found = []
        for row in rows:
            assert row.took is not None  # others are not kept
            each = [self._speeds.microbatch(row.seconds[r], row.microbatches[r]) for r in control]
            found.append(Measured(row.took, median(each)))
        return found

    def _undo(self, current: SyncPlan, outcome: Outcome) -> Proposed[ShareDecision]:
        """Propose the faster counts of before, and block others for a while: predictions fail."""
        decision, (before, ours) = self.log.last, outcome
        assert decision is not None
        why = f"iterations take {1e3 * ours:.4g} ms, before {1e3 * before:.4g}"
        after = SyncPlan(current.microbatches, tuple(decision.before))
        return self._proposed(
            current, after, why,
            predicted_ms=1e3 * before, full_ms=1e3 * ours, lower_bound_ms=None,
            gain=(ours - before) / ours, again=self._attempt.backoff.until,
        )  # fmt: skip

    def _choose(self, row: ReplicaRow, current: SyncPlan) -> Proposed[ShareDecision] | None:
        """Choose counts anew: other replicas are slow."""
        iteration, slow = row.iteration, self._speeds.slow()
        attempt = self._attempt
        blocked = slow and attempt.backoff.blocks(iteration)
        if blocked or not self._speeds.known or not self._rests:
            return None  # it stays changed until it is accepted
        began, step, speeds = time.perf_counter(), median(self._rests), self._speeds.speeds()
        share = share_by_speed(speeds, current.microbatches, step)
        taken, remedies = share.predicted, None
        gain = (share.full - taken) / share.full
        words = f"{shares_in_words(share.sync)} would save {gain:.0%} of an iteration, "
        words += f"less than --adaptra-min-gain {self._min_gain:.0%}"
        worth = bool(slow) and gain >= self._min_gain
        if slow and current.full and self._offered is not None:
            ladder = self._climb(iteration, share, self._offered)
            if ladder is None:
                return None  # a cheaper remedy is to act: it stays changed until none is slow
            worth, words = ladder.chosen == SHARES, ladder_in_words(ladder, self._min_gain)
            taken, remedies = ladder.predicted, ladder.cheaper
        plan = share.sync
        if not worth:
            plan, taken = SyncPlan.full_of(current.replicas, current.microbatches), share.full
        seconds = time.perf_counter() - began
        hosts = [
            f"replica {replica}: {use.in_words()}"
            for replica, use in enumerate(row.uses)
            if use is not None and replica in slow
        ]
        changes = self._speeds.changes()
        if not changes and attempt.again is not None:
            changes = [attempt.again[1]]
        elif slow and not worth and plan == current:
            self.vote.note(f"{'; '.join([*changes, *hosts])}: {words}; counts stay")
        why = "; ".join([*changes, *hosts])
        if plan == current:
            self._speeds.accept()
            waits = slow and current.full
            attempt.again = (iteration + AGAIN, "; ".join(changes)) if waits else None
            return None
        if remedies is None:
            remedies = cheaper_remedies(speeds, current.microbatches, step, self._stages)
        return self._proposed(
            current, plan, why,
            predicted_ms=1e3 * taken, full_ms=1e3 * share.full, lower_bound_ms=1e3 * share.bound,
            gain=(share.full - taken) / share.full, planning_ms=1e3 * seconds,
            microbatch_ms=[1e3 * one.per_microbatch for one in speeds],
            outside_ms=[1e3 * one.outside for one in speeds],
            cheaper=[one.to_json() for one in remedies],
        )  # fmt: skip

    def _climb(self, iteration: int, share: SharePlan, offered: Offered) -> Ladder | None:
        """Return the ladder after the reports of `iteration`; None while a cheaper one is to act.

        `share`: the best counts. `offered`: by the planners of cheaper remedies.
        """
        offered.shows = self.acts
        measured = self._since is None or iteration - self._since >= PATIENCE
        # What a collective hides while a replica is late it does not hide when all are in time.
        step = max([share.step, *([median(self._usual)] if self._usual else [])])
        with_shares = max(share.seconds) + step
        known, uncertain = known_remedies(share, with_shares, offered, measured)
        ladder = climb(share.full, known, self._min_gain)
        if ladder.chosen in (FULL, SHARES):
            return ladder
        if ladder.chosen not in uncertain and self._left_to != self._since:
            self._left_to = self._since
            why = "; ".join(self._speeds.changes())
            self.vote.note(f"{why}: {ladder_in_words(ladder, self._min_gain)}; counts stay")
        return None

    def _proposed(
        self, current: SyncPlan, plan: SyncPlan, why: str, **figures: Any
    ) -> Proposed[ShareDecision]:
        """Propose a `plan` in place of the `current` one. `figures`: more of its decision."""
        slow = sorted(self._speeds.slow())
        answers = [] if self._diagnosis is None else self._diagnosis.answers(slow)
        decision = ShareDecision(
            why=why, microbatches=plan.microbatches, before=list(current.counts),
            after=list(plan.counts), slow=slow, answers=answers, **figures,
        )  # fmt: skip
        return Proposed(Bundle({SYNC: plan}), decision)

    def back(self, why: str) -> Proposed[ShareDecision] | None:
        current = self._runs
        if current is None or current.full or not (self._speeds.known and self._rests):
            return None
        self._attempt.hold(self.log.last)
        share = share_by_speed(self._speeds.speeds(), current.microbatches, median(self._rests))
        full = SyncPlan.full_of(current.replicas, current.microbatches)
        return self._proposed(
            current, full, why,
            predicted_ms=1e3 * share.full, full_ms=1e3 * share.full, lower_bound_ms=None, gain=0.0,
        )  # fmt: skip

    def held(self, decision: ShareDecision) -> None:
        self._attempt.hold(decision)
        self._speeds.accept()

    def resume(self) -> None:
        self._attempt.resume()

    def switched(self, decision: ShareDecision, before: ShareDecision | None) -> None:
        self._speeds.accept()
        shared = set(decision.after) != {decision.microbatches}
        self._attempt.switched(decision, before, tried=decision.again is None and shared)
