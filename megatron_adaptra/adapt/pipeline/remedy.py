"""The remedy of one pipeline: the order and the depth of its ops."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from megatron_adaptra.adapt.loop import Vote
from megatron_adaptra.adapt.schedules.advice import Starvation
from megatron_adaptra.adapt.schedules.policy import (
    EXECUTOR,
    Change,
    frees,
    has_recovered,
    no_gain,
    was,
)
from megatron_adaptra.adapt.schedules.remedy import AGAIN, LEARN, PlanRemedy
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.routes import Path
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.replica_estimate import Changed
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.plan import Plan, make_plan
from megatron_adaptra.plan.link_words import link_in_words, out_of_bandwidth, ports_in_words
from megatron_adaptra.sim.clock import simulate

PipelineChange = Change[Plan, Conditions]


class PipelineRemedy(PlanRemedy[Plan, Conditions]):
    """A pipeline remedy plans the schedule of one pipeline from what its stages measure."""

    estimator: Estimator
    # Links for which no plan gained enough, with the seconds that they took before.
    _declined: dict[Path, float]
    _declined_at = 0
    _fastest: Plan  # of those made last, worth it or not
    _compared: tuple[float, float]  # seconds of an iteration by the plan in force, and by that one
    # Links that have become slow, conditions, and seconds by the native engine's plan for them.
    _asked: tuple[dict[Path, float], Conditions, float] | None = None

    def start(self, vote: Vote) -> None:
        super().start(vote)
        self._starvation = Starvation(self.senders)

    def _settings(self) -> dict[str, Any]:
        return {"estimator": self.estimator.settings()}

    def _log_outcome(self, iteration: int, rows: Mapping[int, StageReport]) -> None:
        super()._log_outcome(iteration, rows)
        reports, seconds = list(rows.values()), rows[0].seconds
        if seconds is None or not self.estimator.on_device:
            return
        if text := self._starvation.update(reports, seconds):
            self.vote.note(text)

    def observed(self, iteration: int, row: Mapping[int, StageReport]) -> None:
        super().observed(iteration, row)
        asked, self._asked = self._asked, None
        if self.advice is None or asked is None:
            return
        before, c, native = asked
        if text := self.advice.on_executor(c, native):
            about = f"{EXECUTOR}: {sorted(before)}"
            self.vote.note(f"{text}; {_changes(before, c)}", about)

    def _update(self, rows: Mapping[int, StageReport]) -> Changed:
        reports = list(rows.values())
        changed = Changed(self.estimator.update(reports), [])
        self._over_budget |= self.estimator.measure_budget(reports)
        return changed

    def _learns(self, iteration: int, ran: Schedule) -> bool:
        often = ran.stock and self.estimator.stock_delay > 0
        return often or super()._learns(iteration, ran)

    def _replan(self, changed: bool) -> PipelineChange | None:
        if self._paths and not self._postponed(changed):
            return self._for_links()
        if self._iteration % LEARN == 0 and self.estimator.calibrated:
            return self._reconsider()
        return None

    def stock(self) -> Timeline:
        """Simulate unchanged Megatron, which posts a receive when it needs the message."""
        conditions = self.estimator.conditions(native=True)
        policy = "interleaved" if conditions.chunks > 1 else "1f1b"
        measured = self._in_force.stock or self.estimator.stock_measured
        sends = self.rule.sends_of_stock(measured)
        schedule = make_plan(conditions, policy, sends).schedule
        return simulate(lower(schedule, 0), conditions, sends)

    def evaluate(self, schedule: Schedule, conditions: Conditions) -> Plan:
        return self.rule.evaluate(schedule, conditions)

    def _forget(self) -> None:
        super()._forget()
        self._declined = {}

    def _way_back(self, current: Plan, plan: Plan, to_start: bool) -> str:
        depths = _warmups(current, plan)
        return _what_back(current, plan) if to_start else f"back to that plan ({depths})"

    def _why_spared(self, current: Plan, start: Plan) -> str:
        return f"a deeper warmup gains too little now: {_what_back(current, start)}"

    def _for_links(self) -> PipelineChange | None:
        """Plan for links whose delays have changed for good; None where no swap is worth it now."""
        c, before, self._paths = self.estimator.conditions(), self._paths, {}
        eased = any(c.message_seconds(*link) < before[link] for link in before)
        self._accept()
        change = self._swap(before, c, eased)
        if not eased:
            self._asked = before, c, self._compared[0] if change is None else change.plan.predicted
        if change is None:
            if not eased:
                self.stays = why_none(before, c, *self._compared, self.rule.min_gain)
                self.about = f"no plan for {sorted(before)}"
            self._decline(before, c)
        elif self._trials.backoff(change.plan.schedule).blocks(self._iteration):
            self._paths, change = before, None
        return change

    def _swap(
        self, before: dict[Path, float], c: Conditions, eased: bool = False
    ) -> PipelineChange | None:
        """Return the change to the plan for conditions `c`; None where it is not worth it.

        `before`: the links that it is for, with the seconds they took; `eased`: one takes less now.
        """
        began = time.perf_counter()
        current, plan = self._evaluate(self._in_force, c), self._choose(c)
        self._compared = current.predicted, self._fastest.predicted
        if not self.rule.worth(plan, current, eased):
            return None
        native = self.estimator.conditions(native=True) if self._in_force.stock else None
        back, on_device = plan.schedule is self._start, self.estimator.on_device
        well = back and all(has_recovered(old, c.message_seconds(*x)) for x, old in before.items())
        why = why_swap(before, c, current, plan, back, native, on_device, well)
        seconds = time.perf_counter() - began
        return Change(why, plan, current, c, seconds, before, retry=True, recovered=well)

    def _decline(self, before: Mapping[Path, float], conditions: Conditions) -> None:
        """Keep the links that are slower than `before`, as no plan gains enough from them.

        That was found by a few samples. An iteration that something has held up, among them, makes
        all ops look longer, and the gain less.
        """
        known = {**before, **self._declined}
        self._declined_at = self._iteration
        self._declined = {
            link: old for link, old in known.items() if conditions.message_seconds(*link) > old
        }

    def _look_again(self) -> PipelineChange | None:
        """Propose a plan for the links that were declined, if it gains enough by what is known."""
        if self._iteration > self._declined_at + AGAIN:
            self._declined = {}
        if not self._declined or self._trials.blocks_any(self._iteration):
            return None
        return self._swap(self._declined, self.estimator.conditions())

    def _reconsider(self) -> PipelineChange | None:
        if (change := self._look_again()) is not None:
            return change
        if not self._in_force.same_as(self._start):
            return super()._reconsider()
        blocked = self._trials.blocks_leaving(self._in_force, self._iteration)
        if blocked or self.estimator.stock_extra == 0:
            return None
        # Perhaps it has only turned out by now how much Megatron's messages cost.
        conditions = self.estimator.conditions()
        current = self._evaluate(self._in_force, conditions)
        if current.extra <= self.rule.min_gain * current.predicted:
            return None
        plan = self._choose(conditions)
        if not self.rule.worth(plan, current, eased=False):
            return None
        native = self.estimator.conditions(native=True)
        worst = max(native.links, key=lambda link: native.message_seconds(*link))
        on_device = self.estimator.on_device
        why = why_leave(worst, conditions, native, current, plan, on_device)
        return Change(why, plan, current, conditions, links={worst: 0.0})

    def _choose(self, conditions: Conditions) -> Plan:
        """Return the policy's plan if it is clearly faster, else the first: memory is precious."""
        start = self._evaluate(self._start, conditions)
        self._fastest = plan = self.rule.make_plan(conditions)
        return plan if self.rule.gains(plan, start) else start

    def _stock_extra(self, plan: Plan) -> float:
        extra = super()._stock_extra(plan)
        if self._in_force.stock:  # then nobody has to guess
            extra = min(extra, max(0.0, min(self._seconds, default=0.0) - plan.predicted))
        return extra


def why_swap(
    before: Mapping[tuple[int, int], float],
    conditions: Conditions,
    current: Plan,
    plan: Plan,
    back: bool,
    native: Conditions | None = None,
    on_device: bool = True,
    recovered: bool = False,
) -> str:
    """Describe the decision for changed links in one sentence, for people.

    Args:
        before: links that have changed, with the seconds that a message took there.
        conditions: what they are now.
        current: what is in force.
        plan: what comes.
        back: whether that is the one without any slow link.
        native: what they are now for Megatron's own messages, where these are in use.
        on_device: Megatron's own messages are a GPU's.
        recovered: none of them is slow any more.
    """
    links = _changes(before, conditions, native, recovered)
    if back:
        return f"{links}: {_what_back(current, plan)}{frees(current, plan) if recovered else ''}"
    rest = ", but not what its bytes take" if set(before) & set(conditions.full_links) else ""
    return f"{links}: {_remedies(current, plan, on_device)}{rest} ({_warmups(current, plan)})"


def why_none(
    before: Mapping[tuple[int, int], float],
    conditions: Conditions,
    now: float,
    best: float,
    min_gain: float,
) -> str:
    """Describe why slow links lead to no plan.

    Args:
        before, conditions: see `why_swap`.
        now, best: seconds of an iteration by the plan in force, and by the fastest one.
        min_gain: see ReplanPolicy.
    """
    text = f"{_changes(before, conditions)}: {no_gain(now, best, min_gain)}"
    full = set(before) & set(conditions.full_links)
    return f"{text}; {out_of_bandwidth(conditions)}" if full else text


def why_leave(
    link: tuple[int, int], conditions: Conditions, native: Conditions, current: Plan, plan: Plan,
    on_device: bool = True,
) -> str:  # fmt: skip
    """Describe the decision in one sentence, where Megatron's own messages cost too much.

    Args:
        link: where most of it is spent.
        conditions, native, current, plan, on_device: see `why_swap`.
    """
    return (
        f"Megatron's own messages hold up an iteration by {1e3 * current.extra:.3g} ms; most on "
        f"link {link[0]}->{link[1]}, which takes {_takes(link, conditions, native)}: "
        f"{_remedies(current, plan, on_device)} "
        f"({_warmups(current, plan)})"
    )


def _remedies(current: Plan, plan: Plan, on_device: bool) -> str:
    by_us = "our connections carry its messages"
    if on_device:
        by_us = "its messages leave the GPU's queue"
    found = [by_us] if current.schedule.stock else []
    if not found or current.schedule.warmup != plan.schedule.warmup:
        found.append("a deeper warmup hides it")
    return ", and ".join(found)


def _changes(
    before: Mapping[tuple[int, int], float],
    conditions: Conditions,
    native: Conditions | None = None,
    recovered: bool = False,
) -> str:
    """Describe the links that have changed: what each takes, and took."""
    found = [
        (f"{a}->{b}", f"{_takes((a, b), conditions, native)}, {was(old)}")
        for (a, b), old in before.items()
    ]
    links = ", ".join(
        f"{name} has recovered ({took})" if recovered else f"{name} takes {took}"
        for name, took in found
    )
    return f"link {links}{ports_in_words(conditions, before)}"


def _takes(link: tuple[int, int], conditions: Conditions, native: Conditions | None) -> str:
    takes = link_in_words(conditions, link)
    if native is not None:
        theirs = native.message_seconds(*link)
        if theirs >= 2 * conditions.message_seconds(*link):
            takes = f"{1e3 * theirs:.3g} ms for Megatron's messages, for ours {takes}"
    return takes


def _what_back(current: Plan, start: Plan) -> str:
    """Describe going back to the first plan, with the warmup depths of both, for people."""
    what = "Megatron's own messages" if start.schedule.stock else "1F1B"
    return f"back to {what} ({_warmups(current, start)})"


def _warmups(current: Plan, plan: Plan) -> str:
    """Describe both plans' warmup depths, for people."""
    old, new = (",".join(map(str, p.schedule.warmup)) for p in (current, plan))
    return f"warmup {old} -> {new}"
