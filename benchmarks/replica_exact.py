"""The optimum of a small job of several replicas, proven by OR-tools' CP-SAT solver.

Figures of docs/evidence/planner.md, and OPTIMA of tests/unit/plan/replica_cases.py, are printed by

    pip install ortools; python benchmarks/replica_exact.py [FIRST SEED] [CASES] [OPS PER PLAN]

Which worker of a stage runs a microbatch is open, and so is every order. Times are whole numbers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ortools.sat.python import cp_model

from megatron_adaptra.base.errors import AdaptraError
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.routes.reroute import OPS, ReplicaPlan, plan_replicas
from megatron_adaptra.sim.clock import simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))
from plan.replica_cases import small_job

if TYPE_CHECKING:
    from ortools.sat.python.cp_model_helper import LinearExpr

    Expr = LinearExpr | int

NEAR = 1e-6
HALVES = 2  # of a microbatch's activations: I gives one back, and W the other


class ReplicaOptimum(NamedTuple):
    """The best schedule found, its seconds by the simulator, and what no schedule beats."""

    schedule: Schedule
    seconds: float
    bound: float
    proven: bool


class Node(NamedTuple):
    """An op of one unit, as `plan.routes.list_schedule` numbers them, at one stage."""

    kind: Kind
    unit: int
    stage: int


class Sent(NamedTuple):
    """The message that `maker` leaves for `user`, ops of one unit at adjacent stages."""

    maker: Node
    user: Node


def solve_replicas(
    conditions: ReplicaConditions, hint: Schedule, seconds: float = 20.0
) -> ReplicaOptimum:
    """The fastest schedule with any routes; sends are eager.

    Args:
        conditions: whose times are whole numbers, ops taking at least 1.
        hint: a schedule to start from.
        seconds: how long the solver may take, by its own count of its steps.
    """
    c = conditions
    start = simulate(lower(hint), c).makespan
    model = _Model(c, round(start))
    model.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.use_objective_lb_search = True
    solver.parameters.max_deterministic_time = seconds
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        raise AdaptraError(f"the model is {solver.status_name(status)}: {c}")
    if status == cp_model.UNKNOWN:
        return ReplicaOptimum(hint, start, solver.best_objective_bound, False)
    schedule = model.schedule(solver)
    program = lower(schedule)
    check(program, [0 if w in c.failed else b for w, b in enumerate(c.activation_budget)])
    found = simulate(program, c).makespan
    # Of messages that leave at one moment the model lets the better one go first. Otherwise what
    # it has found is what the simulator makes of it; both start every op as soon as they can.
    assert found >= solver.best_objective_bound - NEAR
    bound = solver.best_objective_bound
    return ReplicaOptimum(schedule, found, bound, found <= bound + NEAR)


class _Model:
    """All schedules that take at most `horizon`."""

    def __init__(self, conditions: ReplicaConditions, horizon: int) -> None:
        c = self.conditions = conditions
        self.horizon, self.model = horizon, cp_model.CpModel()
        self.units = c.replicas * c.microbatches
        self.back = Kind.I if c.pipeline.split else Kind.B
        self.kinds = [Kind.F, self.back, *([Kind.W] if c.pipeline.split else [])]
        self.places = list(product(range(self.units), range(c.stages)))
        model = self.model
        # Whether a unit runs on a worker.
        self.on = {(unit, w): model.new_bool_var("") for unit, s in self.places for w in c.alive(s)}
        for unit, s in self.places:
            model.add_exactly_one(self.on[unit, w] for w in c.alive(s))
        nodes = [Node(kind, *place) for kind in self.kinds for place in self.places]
        self.starts = {n: model.new_int_var(0, horizon, "") for n in nodes}
        self.ends: dict[Node, Expr] = {n: self.starts[n] + self._length(n) for n in nodes}
        self._add_workers()
        self._add_memory()
        self._add_dependencies()
        # Units are alike: they may be numbered as they begin.
        for unit in range(self.units - 1):
            first, second = (self.starts[Node(Kind.F, u, 0)] for u in (unit, unit + 1))
            model.add(first <= second)
        makespan = model.new_int_var(0, horizon, "")
        for n in nodes:
            if n.kind is self.kinds[-1]:
                model.add(makespan >= self.ends[n])
        model.minimize(makespan)

    def hint(self, schedule: Schedule) -> None:
        """Start from this schedule, with its units numbered as they begin."""
        c = self.conditions
        spans = simulate(lower(schedule), c).spans
        units = [(s.op.home, s.op.microbatch) for s in sorted(spans, key=lambda s: s.start)]
        number = {unit: i for i, unit in enumerate(dict.fromkeys(units))}
        for span in spans:
            unit = number[span.op.home, span.op.microbatch]
            node = Node(span.op.kind, unit, span.stage % c.stages)
            self.model.add_hint(self.starts[node], round(span.start))
            if node.kind is Kind.F:
                for w in c.alive(node.stage):
                    self.model.add_hint(self.on[unit, w], w == span.stage)

    def schedule(self, solver: cp_model.CpSolver) -> Schedule:
        """The solution found."""
        c, count = self.conditions, self.conditions.microbatches
        lines: list[list[tuple[int, Op]]] = [[] for _ in range(c.workers)]
        for n, start in self.starts.items():
            w = next(w for w in c.alive(n.stage) if solver.value(self.on[n.unit, w]))
            op = Op(n.kind, n.unit % count, 0, n.unit // count)
            lines[w].append((solver.value(start), op))
        order = tuple(tuple(op for _, op in sorted(line)) for line in lines)
        return Schedule(order, count, policy="exact", replicas=c.replicas)

    def _seconds(self, kind: Kind, worker: int) -> int:
        seconds = self.conditions.seconds(kind, worker)
        assert seconds == int(seconds) >= 1, "times are whole"
        return int(seconds)

    def _length(self, node: Node) -> Expr:
        workers = self.conditions.alive(node.stage)
        each = [self._seconds(node.kind, w) for w in workers]
        if len(set(each)) == 1:
            return each[0]
        return sum(x * self.on[node.unit, w] for x, w in zip(each, workers, strict=True))

    def _add_workers(self) -> None:
        """A worker runs one op at a time."""
        c, model = self.conditions, self.model
        for s in range(c.stages):
            for w in c.alive(s):
                intervals = [
                    model.new_optional_fixed_size_interval_var(
                        self.starts[n], self._seconds(n.kind, w), self.on[n.unit, w], ""
                    )
                    for n in self.starts
                    if n.stage == s
                ]
                model.add_no_overlap(intervals)

    def _add_memory(self) -> None:
        """Half of a microbatch is held until the end of I, and half until the end of W."""
        c, model = self.conditions, self.model
        for s in range(c.stages):
            for w in c.alive(s):
                room = HALVES * min(c.activation_budget[w], self.units)
                if room >= HALVES * self.units:
                    continue
                held = []
                for unit in range(self.units):
                    start = self.starts[Node(Kind.F, unit, s)]
                    for kind in (self.back, self.kinds[-1]):
                        end, length = (model.new_int_var(0, self.horizon, "") for _ in range(2))
                        model.add(end == self.ends[Node(kind, unit, s)])
                        held.append(
                            model.new_optional_interval_var(
                                start, length, end, self.on[unit, w], ""
                            )
                        )
                model.add_cumulative(held, [1] * len(held), int(room + NEAR))

    def _add_dependencies(self) -> None:
        c, model = self.conditions, self.model
        sent: list[Sent] = []
        for unit, s in self.places:
            back = Node(self.back, unit, s)
            if s + 1 < c.stages:
                sent.append(Sent(Node(Kind.F, unit, s), Node(Kind.F, unit, s + 1)))
                sent.append(Sent(Node(self.back, unit, s + 1), back))
                # What follows from the others, and helps the solver.
                model.add(self.starts[back] >= self.ends[Node(self.back, unit, s + 1)])
            else:
                model.add(self.starts[back] >= self.ends[Node(Kind.F, unit, s)])
            if c.pipeline.split:
                model.add(self.starts[Node(Kind.W, unit, s)] >= self.ends[back])
        self.left: dict[Sent, cp_model.IntVar] = {}
        self.over: dict[tuple[Sent, int, int], cp_model.IntVar] = {}
        for message in sent:
            self._add_message(message)
        for a, b in combinations(self.left, 2):
            self._add_queue(a, b)

    def _ways(self, message: Sent) -> list[tuple[int, int]]:
        c = self.conditions
        return list(product(c.alive(message.maker.stage), c.alive(message.user.stage)))

    def _wire(self, source: int, target: int) -> int:
        c = self.conditions
        return round(max(c.wire(source, target), c.port(source), c.port(target)))

    def _add_message(self, message: Sent) -> None:
        """Its user starts after it has come, over the path between the workers of the two."""
        c, model, (maker, user) = self.conditions, self.model, message
        unit, ways = maker.unit, self._ways(message)
        lags = {way: (self._wire(*way), round(c.link(*way).delay)) for way in ways}
        start = self.starts[user]
        model.add(start >= self.ends[maker] + min(map(sum, lags.values())))
        queued = any(wire for wire, _ in lags.values())
        if not queued and len(set(lags.values())) == 1:
            return
        if queued:
            self.left[message] = model.new_int_var(0, self.horizon, "")
        for source, target in ways:
            here, there = self.on[unit, source], self.on[unit, target]
            wire, delay = lags[source, target]
            left: Expr = self.ends[maker]
            if queued:
                both = self.over[message, source, target] = model.new_bool_var("")
                model.add_bool_and(here, there).only_enforce_if(both)
                model.add_bool_or(~here, ~there, both)
                left = self.left[message]
                model.add(left >= self.ends[maker] + wire).only_enforce_if(both)
            model.add(start >= left + delay).only_enforce_if(here, there)

    def _add_queue(self, a: Sent, b: Sent) -> None:
        """What is sent first leaves first, over one path and through one port."""
        c, model = self.conditions, self.model
        order: cp_model.IntVar | None = None
        for first, second in ((a, b), (b, a)):
            for source, target in self._ways(second):
                shared = []
                if (source, target) in self._ways(first) and self._wire(source, target):
                    shared.append(self.over[first, source, target])
                for port, node in ((source, first.maker), (target, first.user)):
                    if c.port(port) > 0 and node.stage == port % c.stages:
                        shared.append(self.on[node.unit, port])
                if not shared:
                    continue
                if order is None:
                    order = model.new_bool_var("")
                    sent_a, sent_b = self.ends[a.maker], self.ends[b.maker]
                    model.add(sent_a <= sent_b).only_enforce_if(order)
                    model.add(sent_b <= sent_a).only_enforce_if(~order)
                before = order if first is a else ~order
                mine_over = self.over[second, source, target]
                later = self.left[second] >= self.left[first] + self._wire(source, target)
                for both in shared:
                    model.add(later).only_enforce_if(before, mine_over, both)


class Case(NamedTuple):
    """A small job by its seed, its plan and its optimum."""

    seed: int
    plan: ReplicaPlan
    optimum: ReplicaOptimum


def cases(first: int, count: int, ops: int = OPS, seconds: float = 20.0) -> Iterator[Case]:
    """The jobs with so many seeds from the `first` on.

    Args:
        first: seed.
        count: of them.
        ops: that the planner may schedule for each.
        seconds: that the solver may take for each, by its own count.
    """
    for seed in range(first, first + count):
        c = small_job(seed)
        plan = plan_replicas(c, ops=ops)
        yield Case(seed, plan, solve_replicas(c, plan.schedule, seconds))


def main(first: int = 0, count: int = 200, ops: int = OPS) -> None:
    """Print one line per job, and what they come to."""
    solved, optimal, tight, gaps = 0, 0, 0, []
    began = time.perf_counter()
    for seed, plan, best in cases(first, count, ops):
        took, began = time.perf_counter() - began, time.perf_counter()
        gap = plan.predicted / best.bound - 1
        note = "" if best.proven else "  not proven"
        note += "  BOUND ABOVE THE OPTIMUM" if plan.lower_bound > best.seconds + 1e-6 else ""
        print(
            f"{seed}: plan {plan.predicted:g}, optimum {best.seconds:g},"
            f" bound {plan.lower_bound:g}, {took:.1f} s{note}",
            flush=True,
        )
        if best.proven:
            solved += 1
            optimal += gap < 1e-6
            tight += plan.lower_bound > best.seconds - 1e-6
            gaps.append(gap)
    print(
        f"seeds {first} to {first + count - 1}: {solved} of {count} optima proven; the plan has"
        f" {optimal} of them, above: mean {sum(gaps) / len(gaps):.2%}, worst {max(gaps):.1%};"
        f" the bound equals {tight}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
