"""The ladder's rungs simulated where the time of gradients' reduction is known, too.

An iteration is the replicas' pipelines, the reduction of each stage's gradients, which begins when
the last replica has come to it, and the optimizer step. A remedy is planned from one situation and
may be simulated in another one, as later iterations differ from the measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.plan.ladder import (
    BY_COUNTS,
    COLLECTIVE,
    FULL,
    ONE_STAGE,
    ONLY_COMMUNICATION,
    ONLY_WAITING,
    ORDER,
    ROUTES,
    SHARES,
    Ladder,
    Remedy,
    climb,
)
from megatron_adaptra.plan.pipeline.base import evaluate, make_plan
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Figures
from megatron_adaptra.plan.reductions.selector import choose_all_reduce
from megatron_adaptra.plan.reductions.simulated import NATIVE_CUT, by_gloo
from megatron_adaptra.plan.remedies import (
    MOST,
    NO_PATH,
    OPS,
    POLICY,
    TOO_LARGE,
    TOO_SHORT,
    UNKNOWN,
)
from megatron_adaptra.plan.routes.reroute import NONE, SWAP, evaluate_replicas, plan_replicas
from megatron_adaptra.plan.shares.pipelines import pipeline_of, share_pipelines
from megatron_adaptra.sim.ports import Ports, run_on_ports

ROUTES_OFF, ROUTES_SWAP, ROUTES_AUTO = ROUTE_MODES = ("off", "swap", "auto")  # --adaptra-reroute


@dataclass(frozen=True)
class Reduction:
    """A reduction is the all-reduce of a stage's gradients over all replicas, alike at each stage.

    Args:
        nbytes: of a stage's gradients.
        ports: of the replicas' workers of a stage, with rates that are finite.

    Raises:
        BadInput: bytes below 0.
    """

    nbytes: int
    ports: Ports

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise BadInput("bytes", self.nbytes, "at least 0")

    def seconds(self, choice: Choice, arrivals: tuple[float, ...]) -> float:
        """Return the seconds from the last of the `arrivals`, by replica, to the last end.

        `choice`: the all-reduce that runs; native is gloo's ring.
        """
        ranks, ports = len(self.ports.out), self.ports
        if choice.native:
            choice, ports = Choice(ranks, "ring", NATIVE_CUT), by_gloo(ports)
        plan = choice.plan()
        assert plan is not None
        first = min(arrivals)
        late = tuple(arrival - first for arrival in arrivals)
        return run_on_ports(plan, self.nbytes, ports, late).after_arrival


@dataclass(frozen=True)
class Situation:
    """A situation describes a job, and the remedies for slow replicas that it allows.

    Args:
        conditions: of all workers; none is dead. Its step begins when all gradients are reduced.
        reduction: None where it takes no time, or its time is not known.
        sends: "eager" or "rendezvous".
        policy: the one by which each replica plans its own pipeline.
        allreduce: shares of a collective are allowed (`--adaptra-allreduce auto`).
        routes: which ones are allowed, of ROUTE_MODES (`--adaptra-reroute`).
        ops: the most that a search for routes schedules.

    Raises:
        BadInput: a worker is dead, there is no such mode, or there are not as many ports.
    """

    conditions: ReplicaConditions
    reduction: Reduction | None = None
    sends: str = "eager"
    policy: str = POLICY
    allreduce: bool = True
    routes: str = ROUTES_AUTO
    ops: int = OPS

    def __post_init__(self) -> None:
        c = self.conditions
        if c.failed:
            names = ", ".join(map(c.name, sorted(c.failed)))
            allowed = "remedies for slow replicas need all workers; routes go round dead ones"
            raise BadInput("failed", names, allowed)
        if self.routes not in ROUTE_MODES:
            raise BadInput("routes", self.routes, f"one of {', '.join(ROUTE_MODES)}")
        if self.reduction is not None and len(self.reduction.ports.out) != c.replicas:
            given = len(self.reduction.ports.out)
            raise BadInput("number of ports", given, f"one per replica: {c.replicas}")


@dataclass(frozen=True)
class Applied:
    """An applied remedy holds the schedules and the all-reduces that an iteration runs.

    Args:
        pipelines: by replica, the schedule of its own pipeline; () where `joint` has all.
        joint: of all replicas, with routes.
        choices: by stage, the all-reduce of its gradients; () for native everywhere.
    """

    pipelines: tuple[Schedule, ...] = ()
    joint: Schedule | None = None
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class PlannedLadder(Ladder):
    """A planned ladder has what each available remedy, and FULL, runs in an iteration, by name."""

    applied: Mapping[str, Applied] = field(default_factory=dict)


def seconds_of(situation: Situation, applied: Applied) -> float:
    """Return the seconds of an iteration of `applied` in any `situation`, planned for it or not."""
    ends, step = _ends(situation, applied), situation.conditions.pipeline.step_seconds
    stages, last = situation.conditions.stages, 0.0
    for stage in range(stages):
        arrivals = ends[stage::stages]
        after = 0.0
        if situation.reduction is not None:
            native = Choice(situation.conditions.replicas)
            choice = applied.choices[stage] if applied.choices else native
            after = situation.reduction.seconds(choice, arrivals)
        last = max(last, max(arrivals) + after)
    return last + step


def plan_remedies(situation: Situation, min_gain: float) -> PlannedLadder:
    """Plan all remedies for a `situation`, and choose the cheapest that is enough.

    It is a pure function. `min_gain`: see `climb`. Raises BadInput where not even stock fits into
    the memory for activations, or `min_gain` is below 0.
    """
    planner = _Planner(situation)
    planner.order()
    planner.collective()
    planner.routes()
    planner.shares()
    found = climb(planner.full, planner.remedies, min_gain)
    return PlannedLadder(found.full, found.remedies, found.chosen, planner.applied)


class _Planner:
    """A planner adds one remedy after the other."""

    def __init__(self, situation: Situation) -> None:
        self._situation, self._conditions = situation, situation.conditions
        c = self._conditions
        # Made first: it refuses a job whose activations do not fit as they are.
        self._stock = share_pipelines(c, situation.sends, (c.microbatches,) * c.replicas)
        first = Applied(tuple(plan.schedule for plan in self._stock.plans))
        self.applied = {FULL: first}
        self.full = seconds_of(situation, first)
        self.remedies: list[Remedy] = []

    def _add(self, name: str, applied: Applied, why: str) -> None:
        """Add a remedy; one that makes an iteration longer is replaced by FULL and its time."""
        seconds = seconds_of(self._situation, applied)
        if seconds > self.full:
            seconds, applied = self.full, self.applied[FULL]
        self.applied[name] = applied
        self.remedies.append(Remedy(name, seconds, why))

    def _without(self, name: str, why: str) -> None:
        self.remedies.append(Remedy(name, None, why))

    def order(self) -> None:
        """Add another order: each pipeline by a plan of its own, where that is faster."""
        c, policy, known = self._conditions, self._situation.policy, list[Conditions]()
        made = list[Schedule]()
        chosen = []
        for replica, stock in enumerate(self._stock.plans):
            one = pipeline_of(c, replica, c.microbatches)
            if one not in known:
                plan = make_plan(one, policy, self._situation.sends)
                known.append(one)
                made.append((plan if plan.predicted < stock.predicted else stock).schedule)
            chosen.append(made[known.index(one)])
        self._add(ORDER, Applied(tuple(chosen)), ONE_STAGE if c.stages == 1 else ONLY_WAITING)

    def collective(self) -> None:
        """Add the all-reduce that is the fastest for the lateness of the replicas."""
        if not self._situation.allreduce:
            self._without(COLLECTIVE, "it is not allowed: --adaptra-allreduce auto is")
            return
        if self._situation.reduction is None:
            self._without(COLLECTIVE, UNKNOWN)
            return
        stages, ends = self._conditions.stages, _ends(self._situation, self.applied[FULL])
        choices = tuple(self._choice(ends[stage::stages]) for stage in range(stages))
        applied = replace(self.applied[FULL], choices=choices)
        self._add(COLLECTIVE, applied, ONLY_COMMUNICATION)

    def _choice(self, arrivals: tuple[float, ...]) -> Choice:
        reduction, native = self._situation.reduction, Choice(len(arrivals))
        assert reduction is not None
        if not self.full:
            return native
        first = min(arrivals)
        late = tuple(arrival - first for arrival in arrivals)
        figures = Figures(reduction.nbytes, reduction.ports, late, self.full)
        return choose_all_reduce(figures, native, 0.0).choice

    def routes(self) -> None:
        """Add the best of the moves that are allowed."""
        mode, c = self._situation.routes, self._conditions
        if mode == ROUTES_OFF:
            self._without(ROUTES, "they are not allowed: --adaptra-reroute swap or auto are")
            return
        if c.stages == 1:
            self._without(ROUTES, TOO_SHORT)
            return
        if c.workers * c.microbatches > MOST:
            self._without(ROUTES, TOO_LARGE)
            return
        found = plan_replicas(c, self._situation.sends, ops=self._situation.ops)
        swaps = mode == ROUTES_SWAP
        moves = [one for one in found.moves if one.name in (NONE, SWAP) or not swaps]
        plans = [Applied(joint=one.schedule) for one in moves]
        best = min(plans, key=lambda one: seconds_of(self._situation, one))
        name = moves[plans.index(best)].name
        self._add(ROUTES, best, NO_PATH if name == NONE else name)

    def shares(self) -> None:
        """Add fewer microbatches for slow replicas."""
        sends = self._situation.sends
        try:
            plan = share_pipelines(self._conditions, sends)
        except BadInput as error:
            self._without(SHARES, str(error))
            return
        pipelines = tuple(one.schedule for one in plan.plans)
        self._add(SHARES, Applied(pipelines), BY_COUNTS)


def _ends(situation: Situation, applied: Applied) -> tuple[float, ...]:
    """Return, by worker, the seconds until it has computed all of its ops."""
    c, sends = situation.conditions, situation.sends
    if applied.joint is not None:
        return _ends_of(evaluate_replicas(applied.joint, c, sends).timeline, c.workers)
    ends, known = list[float](), list[tuple[Conditions, Schedule, tuple[float, ...]]]()
    for replica, schedule in enumerate(applied.pipelines):
        one = pipeline_of(c, replica, schedule.microbatches)
        like = next((e for a, b, e in known if a == one and b is schedule), None)
        if like is None:
            like = _ends_of(evaluate(schedule, one, sends).timeline, c.stages)
            known.append((one, schedule, like))
        ends += like
    return tuple(ends)


def _ends_of(timeline: Timeline, workers: int) -> tuple[float, ...]:
    ends = [0.0] * workers
    for span in timeline.spans:
        if span.op.kind.computes:
            ends[span.stage] = max(ends[span.stage], span.end)
    return tuple(ends)
