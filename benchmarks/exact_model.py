"""The constraint model of `exact.py`: what `sim/clock.py` times, as OR-tools' CP-SAT sees it.

Every op has a start in whole ticks. Where the pipeline leaves open which of two ops of a stage
comes first, one Boolean says it; time, memory and the queue of a link all follow these.
"""

from __future__ import annotations

from graphlib import TopologicalSorter
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ortools.sat.python import cp_model

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.deps import ACTIVATION, GRADIENT, Token, consumer, makes, needs
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.routes import Routes
from megatron_adaptra.ir.schedule import INPUT_HALF, RECOMPUTED_SHARE, Line
from megatron_adaptra.ir.timeline import Timeline

if TYPE_CHECKING:
    from ortools.sat.python.cp_model_helper import LinearExpr, Literal

Expr: TypeAlias = "LinearExpr | int"
Truth: TypeAlias = "Literal | bool"
Queue: TypeAlias = tuple[object, int]  # a link, or one way of a port

GRAIN = 20  # parts into which the activations of one chunk are divided: all counts become whole
_KEPT, _HALF = round(GRAIN * RECOMPUTED_SHARE), round(GRAIN * INPUT_HALF)
_GIVES_BACK = {Kind.B: GRAIN, Kind.I: _HALF, Kind.W: GRAIN - _HALF}


class Node(NamedTuple):
    """An op, and where it runs."""

    stage: int
    op: Op


def nodes_of(conditions: Conditions) -> list[Node]:
    """All ops of a job, and an R for every forward that may be recomputed."""
    kinds = [Kind.F, *([Kind.I, Kind.W] if conditions.split else [Kind.B])]
    kinds += [Kind.R] * conditions.recompute
    return [
        Node(stage, Op(kind, microbatch, chunk))
        for stage in range(conditions.stages)
        for kind in kinds
        for chunk in range(conditions.chunks)
        for microbatch in range(conditions.microbatches)
    ]


class Model:
    """All schedules of `conditions` that take at most `horizon`, both in whole ticks.

    Microbatches are alike, so the k-th forward of a chunk may be called that of microbatch k, on
    every stage: what arrives k-th is used k-th. The same holds for I and W, and so nothing is lost
    by taking each kind in microbatch order (and W has to be, as gradients are summed in that
    order). Only with recompute could a forward that overtakes another one save something; such
    orders are left out.
    """

    def __init__(self, conditions: Conditions, horizon: int) -> None:
        self.conditions, self.horizon = conditions, horizon
        self.model, self.nodes = cp_model.CpModel(), nodes_of(conditions)
        model = self.model
        self.by_stage = [[n for n in self.nodes if n.stage == s] for s in range(conditions.stages)]
        # Whether a forward, by its `_key`, is recomputed. If not, its R stands there but is empty.
        self.recomputed = {
            _key(n): model.new_bool_var("") for n in self.nodes if n.op.kind is Kind.R
        }
        self.start = {n: model.new_int_var(0, horizon, "") for n in self.nodes}
        self.end: dict[Node, Expr] = {}
        for line in self.by_stage:
            intervals = []
            for n in line:
                length: Expr = self._length(n)
                self.end[n] = self.start[n] + length
                if n.op.kind is Kind.R:
                    length = self._length(n) * self.recomputed[_key(n)]
                    self.end[n] = model.new_int_var(0, horizon, "")
                intervals.append(model.new_interval_var(self.start[n], length, self.end[n], ""))
            model.add_no_overlap(intervals)
        # What its message queues for, and the ticks for which it holds that.
        self.sent: dict[Node, tuple[frozenset[Queue], int]] = {}
        self.left: dict[Node, cp_model.IntVar] = {}  # when its last byte has left
        self.needed: dict[Node, list[Node]] = {n: [] for n in self.nodes}
        self.before: dict[tuple[Node, Node], Truth] = {}
        self._add_dependencies()
        self._add_order()
        for stage, budget in enumerate(conditions.activation_budget):
            if budget < conditions.microbatches:
                self._add_budget(stage, int(GRAIN * conditions.chunks * budget + 1e-6))
        self.makespan = model.new_int_var(0, horizon, "")
        model.add_max_equality(self.makespan, list(self.end.values()))
        model.minimize(self.makespan)

    def hint(self, timeline: Timeline) -> None:
        """Start from this schedule, timed in ticks."""
        ran = {Node(span.stage, span.op): span for span in timeline.spans}
        for n in self.nodes:
            if n in ran:
                self.model.add_hint(self.start[n], round(ran[n].start))
            else:  # an R that is not made: it takes no time right after its forward
                forward = Node(n.stage, n.op._replace(kind=Kind.F))
                self.model.add_hint(self.start[n], round(ran[forward].end))
            if n.op.kind is Kind.R:
                self.model.add_hint(self.recomputed[_key(n)], int(n in ran))

    def order(self, solver: cp_model.CpSolver) -> tuple[Line, ...]:
        """The lines of the solution found."""
        return tuple(
            tuple(
                n.op
                for n in sorted(line, key=lambda n: solver.value(self.start[n]))
                if n.op.kind is not Kind.R or solver.value(self.recomputed[_key(n)])
            )
            for line in self.by_stage
        )

    def _length(self, node: Node) -> int:
        return round(self.conditions.seconds(node.op.kind, node.stage) / self.conditions.chunks)

    def _maker(self, token: Token) -> Node:
        kind = Kind.F if token.kind == ACTIVATION else Kind.R
        if token.kind == GRADIENT:
            kind = Kind.I if self.conditions.split else Kind.B
        chunk, stage = divmod(token.position, self.conditions.stages)
        return Node(stage, Op(kind, token.microbatch, chunk))

    def _add_dependencies(self) -> None:
        """What `ir.deps` says, over links that take time; and microbatch order for each kind."""
        c, model = self.conditions, self.model
        routes = Routes(c.stages, c.chunks)
        for n in self.nodes:
            made = makes(n.op, n.stage, routes)
            target = consumer(made, routes) if made else None
            if target is not None:
                link = n.stage, target
                wire = round(c.passes(*link))
                if wire:
                    self.sent[n] = self._queues(*link), wire
                    self.left[n] = model.new_int_var(0, self.horizon, "")
                    model.add(self.left[n] >= self.end[n] + wire)
        for n in self.nodes:
            for token in needs(n.op, n.stage, routes, c.recompute):
                maker = self._maker(token)
                there = self.end[maker]
                if maker.stage != n.stage:
                    delay = round(c.link(maker.stage, n.stage).delay)
                    there = self.left.get(maker, there) + delay
                model.add(self.start[n] >= there)
                self.needed[n].append(maker)
            earlier = [n.op._replace(microbatch=k) for k in range(n.op.microbatch)]
            if n.op.kind is not Kind.R:
                earlier = earlier[-1:]  # the others follow, as none of them may be missing
            for other in (Node(n.stage, op) for op in earlier):
                both = [self.recomputed[_key(r)] for r in (other, n) if n.op.kind is Kind.R]
                model.add(self.start[n] >= self.end[other]).only_enforce_if(*both)
                self.needed[n].append(other)

    def _add_order(self) -> None:
        """For any two ops of a stage, whether the first one comes first."""
        model, known = self.model, self._ancestors()
        for a, b in (pair for line in self.by_stage for pair in combinations(line, 2)):
            if a in known[b] or b in known[a]:
                self.before[a, b], self.before[b, a] = a in known[b], b in known[a]
            else:
                first = model.new_bool_var("")
                self.before[a, b], self.before[b, a] = first, ~first
                model.add(self.start[b] >= self.end[a]).only_enforce_if(first)
                model.add(self.start[a] >= self.end[b]).only_enforce_if(~first)
        for a, b in combinations(self.sent, 2):
            if not self.sent[a][0] & self.sent[b][0]:
                continue
            if a.stage != b.stage:  # they share a port, which takes messages as they are sent
                first = model.new_bool_var("")
                model.add(self.end[a] <= self.end[b]).only_enforce_if(first)
                model.add(self.end[b] <= self.end[a]).only_enforce_if(~first)
                self.before[a, b], self.before[b, a] = first, ~first
            for one, other in ((a, b), (b, a)):
                left = self.left[one] + self.sent[other][1]
                model.add(self.left[other] >= left).only_enforce_if(self.before[one, other])

    def _queues(self, source: int, target: int) -> frozenset[Queue]:
        """What passes one message at a time: a link, and ports that are limited."""
        ends = {("out", source), ("in", target)}
        limited = {(way, stage) for way, stage in ends if stage in self.conditions.ports}
        return frozenset({(source, target), *limited})

    def _ancestors(self) -> dict[Node, set[Node]]:
        """Per op, all that come before it in every schedule."""
        known: dict[Node, set[Node]] = {}
        for node in TopologicalSorter(self.needed).static_order():
            direct = self.needed[node]
            known[node] = set(direct).union(*(known[other] for other in direct))
        return known

    def _add_budget(self, stage: int, most: int) -> None:
        """The activations held after every op that adds some; see `ir.schedule.in_flight`."""
        line, model = self.by_stage[stage], self.model
        for here in line:
            if here.op.kind in _GIVES_BACK:
                continue
            held: list[Expr] = [self._change(here, True)]
            chains: dict[tuple[Kind, int], list[Truth]] = {}
            for n in line:
                if n == here:
                    continue
                if n.op.kind in _GIVES_BACK:
                    chains.setdefault((n.op.kind, n.op.chunk), []).append(self.before[n, here])
                else:
                    held.append(self._change(n, self.before[n, here]))
            for (kind, _), literals in chains.items():
                held.append(-_GIVES_BACK[kind] * self._count(literals))
            model.add(sum(held) <= most)

    def _change(self, node: Node, done: Truth) -> Expr:
        """What F or R adds, if `done`."""
        if done is False:
            return 0
        recomputed = self.recomputed.get(_key(node))
        if recomputed is None:
            return GRAIN * done
        if done is not True:
            both = self.model.new_bool_var("")
            self.model.add_bool_and(done, recomputed).only_enforce_if(both)
            self.model.add_bool_or(~done, ~recomputed, both)
            recomputed = both
        if node.op.kind is Kind.R:
            return (GRAIN - _KEPT) * recomputed
        return GRAIN * done - (GRAIN - _KEPT) * recomputed

    def _count(self, literals: list[Truth]) -> Expr:
        """How many of a chain are true, where each implies the one before it.

        Their sum, as a variable, from which the solver infers more: three are true if the third is.
        """
        count = self.model.new_int_var(0, len(literals), "")
        for n, literal in enumerate(literals):
            if literal is False:
                self.model.add(count <= n)
                break
            if literal is True:
                self.model.add(count > n)
            else:
                self.model.add(count > n).only_enforce_if(literal)
                self.model.add(count <= n).only_enforce_if(~literal)
        return count


def _key(node: Node) -> tuple[int, int, int]:
    return node.stage, node.op.microbatch, node.op.chunk
