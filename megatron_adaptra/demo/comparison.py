"""The measured run of a plan beside the prediction for it, and why the two differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from megatron_adaptra.adapt.leader import Leader
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.adapt.schedules.policy import AnyConditions, AnyPlan
from megatron_adaptra.base.units import brief
from megatron_adaptra.demo.cpu_load import Load
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import parse_worker
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline

WARM_UP = 2  # iterations at the start that no median counts
OFF = 0.15  # a prediction that is off by more is explained
BUSY = 0.10  # others' share of the CPU time from which on a machine is called busy
_DIFFERS = 0.10  # share by which a cause has to differ to be named
_WAY = {1: "longer", -1: "less"}


class Outlook(NamedTuple):
    """An outlook holds `conditions` to judge a plan by, and stock Megatron's timeline in them."""

    conditions: AnyConditions
    stock: Timeline

    @classmethod
    def now(cls, controller: Leader) -> Outlook:
        """Return the outlook for links and stages as measured now. Only on the leader."""
        remedy = controller.loop.remedy
        return cls(remedy.estimator.conditions(), remedy.stock())

    @classmethod
    def of(cls, decision: PlanDecision) -> Outlook:
        """Return the outlook from the time when the decision was made."""
        return cls(conditions_of(decision), decision.stock)


def conditions_of(decision: PlanDecision) -> AnyConditions:
    """Return the conditions of the decision: of one pipeline, or of all replicas."""
    data = decision.conditions
    several = "replicas" in data
    return ReplicaConditions.from_json(data) if several else Conditions.from_json(data)


class Life(NamedTuple):
    """A life holds the whole `iterations` of a phase on the plan of `decision`, `until` another.

    The first iteration on a plan is not whole: it receives what the plan before has sent.
    `decision` None: the plan that the run began with.
    """

    decision: PlanDecision | None
    until: PlanDecision | None
    iterations: range


@dataclass(frozen=True)
class Comparison:
    """A comparison covers one plan in one phase, run since iteration `since`; ms are by arm.

    `plan`: as predicted. `why_not_the_last`: empty, or why this is not the last plan of the phase.
    """

    iterations: range
    since: int
    plan: AnyPlan
    stock: Timeline
    predicted_ms: Mapping[str, float]
    measured_ms: Mapping[str, float]
    why_not_the_last: str = ""

    def ran(self, arm: str, measured: Timeline | None) -> Ran:
        """Return the run of `arm`; `measured`: its iteration that is drawn, None for none."""
        predicted = self.stock if arm == "stock" else self.plan.timeline
        drawn = None if measured is None else (predicted, measured)
        ms = self.predicted_ms[arm], self.measured_ms[arm]
        return Ran(arm, self.iterations, *ms, self.plan.conditions, drawn)


class Ran(NamedTuple):
    """A run compares the `measured_ms` that `who` took in `iterations` with `predicted_ms`.

    `conditions`: of the prediction. `drawn`: the predicted and a measured timeline; None for none.
    """

    who: str
    iterations: range
    predicted_ms: float
    measured_ms: float
    conditions: AnyConditions
    drawn: tuple[Timeline, Timeline] | None = None


def lives(phase: tuple[int, int], decisions: Sequence[PlanDecision]) -> list[Life]:
    """Return the life of each plan in force in `phase` (first iteration, the one after the last).

    `decisions`: those that came into force, in order.
    """
    found = []
    for decision, until in zip([None, *decisions], [*decisions, None], strict=True):
        begun = 0 if decision is None else decision.iteration
        end = phase[1] if until is None else min(phase[1], until.iteration)
        if begun < phase[1] and end > phase[0]:
            whole = range(max(phase[0], WARM_UP, begun + (decision is not None)), end)
            found.append(Life(decision, until, whole))
    return found


def compare(
    phase: tuple[int, int],
    decisions: Sequence[PlanDecision],
    iteration_ms: Mapping[str, Sequence[float]],
    start: Schedule,
    at_end: Outlook,
    evaluate: Callable[[Schedule, Any], AnyPlan],
) -> Comparison | None:
    """Compare the last plan of `phase` under which a whole iteration ran; None where none did.

    `iteration_ms`: by arm. `start`: the schedule that the run began with. `at_end`: as measured at
    the end of the phase. `evaluate`: makes the plan of a schedule, as the planner times it.
    """
    of_phase = lives(phase, decisions)
    life = next((life for life in reversed(of_phase) if life.iterations), None)
    if life is None:
        return None
    decision, until, whole = life
    schedule = start if decision is None else Schedule.parse(decision.plan)
    outlook = at_end
    if decision is not None and decision.iteration >= phase[0]:
        outlook = Outlook.of(decision)
    elif until is not None and until.iteration < phase[1]:
        outlook = Outlook.of(until)  # measured while this plan ran
    plan = evaluate(schedule, outlook.conditions)
    why_not = ""
    if life is not of_phase[-1]:
        last = of_phase[-1].decision
        assert last is not None
        why_not = (
            f"The last plan (warmup {brief(last.warmup_after)}) came into force in iteration "
            f"{last.iteration} and ran no whole iteration of the phase; what is compared and drawn "
            f"is the plan before it."
        )
    return Comparison(
        whole,
        0 if decision is None else decision.iteration,
        plan,
        outlook.stock,
        {"stock": 1e3 * outlook.stock.makespan, "adaptra": 1e3 * plan.predicted},
        {name: median(values[whole.start : whole.stop]) for name, values in iteration_ms.items()},
        why_not,
    )


def why_off(ran: Ran, delays: Mapping[int, Mapping[str, float]], load: Load | None) -> str:
    """Explain in a sentence why the prediction for `ran` is off; empty where it is not by much.

    `delays`: seconds by iteration and link, such as `2>3`, or `0.1>1.2` of replicas that are
    planned together. `load`: of the machine meanwhile.
    """
    off = ran.measured_ms / ran.predicted_ms - 1 if ran.predicted_ms > 0 else 0.0
    if abs(off) <= OFF:
        return ""
    sign = 1 if off > 0 else -1  # a cause has to work the same way
    causes = []
    if load is not None and load.others > BUSY and sign > 0:
        causes.append(f"the machine was busy, {used_by_others(load)}")
    if ran.drawn is not None:
        causes += _of_ops(*ran.drawn, sign)
        causes += _of_the_step(*ran.drawn, sign)
    causes += _of_links(ran, delays, sign)
    if not causes:
        looked = "ops, optimizer step, links" if ran.drawn else "links"
        causes.append(f"neither {looked} nor the machine's load explain it")
    why = "; ".join(causes)
    return f"{ran.who} took {_percent(abs(off))} {_WAY[sign]} than predicted: {why}."


def used_by_others(load: Load) -> str:
    """Describe the CPU time that other processes used."""
    stolen = f" ({_percent(load.steal)} stolen by the host)" if load.steal >= 0.01 else ""
    return f"other processes used {_percent(load.others)} of its CPU time{stolen}"


def _of_ops(predicted: Timeline, measured: Timeline, sign: int) -> list[str]:
    expected, found = (sum(map(t.busy, range(t.workers))) for t in (predicted, measured))
    if expected <= 0 or sign * (found / expected - 1) <= _DIFFERS:
        return []
    return [f"its forwards and backwards took {_percent(abs(found / expected - 1))} {_WAY[sign]}"]


def _of_the_step(predicted: Timeline, measured: Timeline, sign: int) -> list[str]:
    expected, found = (t.makespan - t.pipeline for t in (predicted, measured))
    if sign * (found - expected) <= _DIFFERS * predicted.makespan:
        return []
    return [f"its optimizer step took {1e3 * found:.3g} ms, planned {1e3 * expected:.3g} ms"]


def _of_links(ran: Ran, delays: Mapping[int, Mapping[str, float]], sign: int) -> list[str]:
    rows = [delays[i] for i in ran.iterations if i in delays]
    causes = []
    names = dict.fromkeys(link for row in rows for link in row)
    several, stages = isinstance(ran.conditions, ReplicaConditions), ran.conditions.stages
    for link in names:
        source, _, target = link.partition(">")
        ends = (parse_worker(end, stages) if several else int(end) for end in (source, target))
        planned = 1e3 * ran.conditions.link(*ends).delay
        found = 1e3 * median(row[link] for row in rows if link in row)
        if sign * (found - planned) > _DIFFERS * ran.predicted_ms:
            what = f"path {link}" if several else f"link {source}->{target}"
            causes.append(f"{what} took {found:.3g} ms, planned {planned:.3g} ms")
    return causes


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
