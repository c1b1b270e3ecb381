"""The order of compute ops on every stage: plain data that planners return."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.user_files import parse_json
from megatron_adaptra.ir.deps import recomputed_of
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.routes import Routes, routes_of, worker_name

Line = tuple[Op, ...]
STOCK = "stock"  # the policy of a schedule that Megatron runs itself, over its own messages
_HEAD = ("microbatches", "chunks", "policy", "why")  # all but the ops, of one replica
_REPLICAS = "replicas"  # comes first, where there are several
INPUT_HALF = 0.5  # share of a microbatch's activations that the input-gradient half gives back
RECOMPUTED_SHARE = 0.05  # what a microbatch that is recomputed holds until its R: its input
_CHANGE = {
    Kind.R: 1.0 - RECOMPUTED_SHARE,
    Kind.B: -1.0,
    Kind.I: -INPUT_HALF,
    Kind.W: INPUT_HALF - 1.0,
}


@dataclass(frozen=True)
class Schedule:
    """A schedule lists the ops that each worker runs, in order.

    Args:
        order: the ops of each worker. In a single pipeline a worker is a stage; with several
            replicas they come replica by replica, and each op names its home.
        microbatches: of an iteration, per replica.
        chunks: model chunks per stage; 1 where there are several replicas.
        policy: the name of the planner.
        why: one sentence for people.
        replicas: pipelines that hold the same parameters, each with a worker per stage.
    """

    order: tuple[Line, ...]
    microbatches: int
    chunks: int = 1
    policy: str = ""
    why: str = ""
    replicas: int = 1

    @property
    def stages(self) -> int:
        """How many stages each replica has."""
        return len(self.order) // self.replicas

    @cached_property
    def routes(self) -> Routes:
        """The routes: which worker runs which microbatch."""
        return routes_of(self.order, self.chunks, self.replicas)

    @property
    def stock(self) -> bool:
        """True where Megatron runs it over its own messages, and not over ours."""
        return self.policy == STOCK

    @property
    def keeps_order(self) -> bool:
        """True where the n-th forward of every worker is of an n-th microbatch.

        So it is where every worker runs all the microbatches of one replica.
        """
        if not self.routes.moved:
            return True
        every = list(range(self.microbatches))
        lines = ([op.microbatch for op in line if op.kind is Kind.F] for line in self.order)
        return all(numbers == every for numbers in lines)

    @property
    def alike(self) -> bool:
        """True where all replicas run the same ops in the same order, each its own microbatches."""
        return self.order == self.one_pipeline().replicated(self.replicas).order

    def one_pipeline(self) -> Schedule:
        """The first replica's part, as the schedule of a single pipeline."""
        lines = self.order[: self.stages]
        order = tuple(tuple(op._replace(home=None) for op in line) for line in lines)
        return replace(self, order=order, replicas=1)

    def same_as(self, other: Schedule) -> bool:
        """Return whether `other` runs the same ops in the same order over the same messages."""
        same = (self.stock, self.replicas) == (other.stock, other.replicas)
        return same and self.order == other.order

    def replicated(self, replicas: int) -> Schedule:
        """Return this schedule repeated in each of so many `replicas`, at home; itself for one."""
        if replicas == 1:
            return self
        order = tuple(
            tuple(op._replace(home=home) for op in line)
            for home in range(replicas)
            for line in self.order
        )
        return replace(self, order=order, replicas=replicas)

    @property
    def warmup(self) -> tuple[int, ...]:
        """Per worker, the forwards it runs before its first backward."""
        return tuple(warmup_of(line) for line in self.order)

    def peak_in_flight(self) -> tuple[float, ...]:
        """Per worker, the most activations held at once, in microbatches."""
        return tuple(peak_in_flight(line, self.chunks) for line in self.order)

    def text(self) -> str:
        """One head line, then one line per worker; `parse` reads it back exactly."""
        rows = [f"schedule {json.dumps(self._head(), sort_keys=True)}"]
        for name, line in zip(self._names(), self.order, strict=True):
            rows.append(f"{name}: {' '.join(map(str, line))}".rstrip())
        return "\n".join(rows) + "\n"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule of a `text` that `text()` has written; raises BadInput for any other."""
        first, *rows = text.splitlines() or [""]
        word, _, head = first.partition(" ")
        if word != "schedule":
            raise BadInput("schedule", first, "the first line starts with 'schedule'")
        try:
            values = parse_json(head)
        except ValueError:
            values = None
        if not isinstance(values, dict) or values.keys() - {_REPLICAS} != set(_HEAD):
            allowed = f"the first line ends with a JSON object of {', '.join(_HEAD)}"
            raise BadInput("schedule", first, allowed)
        names = _names(len(rows), values.get(_REPLICAS, 1))
        order = []
        for i, (row, name) in enumerate(zip(rows, names, strict=True)):
            worker, colon, ops = row.partition(":")
            if worker != name or not colon:
                raise BadInput("schedule", row, f"line {i + 2} starts with '{name}:'")
            order.append(parse_line(ops.split()))
        return cls._checked(tuple(order), values)

    def to_json(self) -> dict[str, Any]:
        """Return an object for json.dump, with the text forms of the ops.

        `stages` holds a list per stage; with several replicas, `workers` holds one per worker, by
        its name, replica and stage: `1.2`.
        """
        lines = [[str(op) for op in line] for line in self.order]
        if self.replicas == 1:
            return {**self._head(), "stages": lines}
        return {**self._head(), "workers": dict(zip(self._names(), lines, strict=True))}

    @classmethod
    def from_json(cls, data: object) -> Schedule:
        """Return the schedule of `data`, read from JSON: from `to_json`, or a plan.

        Where a plan gives no number of microbatches or of chunks, its ops show it. Raises
        BadInput for anything else.
        """
        if not isinstance(data, Mapping):
            raise BadInput(
                "schedule", data, "it has to be an object with stages, microbatches and chunks"
            )
        stages, replicas = data.get("stages"), data.get(_REPLICAS, 1)
        workers = data.get("workers")
        if isinstance(workers, Mapping):
            names = _names(len(workers), replicas)
            if list(workers) != names:
                allowed = f"{len(workers)} of {replicas} replicas, in order, are {', '.join(names)}"
                raise BadInput("workers", list(workers), allowed)
            stages = list(workers.values())
        if not isinstance(stages, list) or not all(
            isinstance(line, list) and all(isinstance(op, str) for op in line) for line in stages
        ):
            raise BadInput("stages", stages, "it has to be a list per stage of ops such as 'F3'")
        _names(len(stages), replicas)  # raises unless the replicas divide the workers
        order = tuple(parse_line(line) for line in stages)
        known: dict[str, Any] = {
            "microbatches": 1 + max((op.microbatch for line in order for op in line), default=0),
            "chunks": 1 + max((op.chunk for line in order for op in line), default=0),
            "policy": "",
            "why": "",
        }
        head = {key: data.get(key, known[key]) for key in _HEAD}
        return cls._checked(order, {**head, _REPLICAS: replicas})

    @classmethod
    def _checked(cls, order: tuple[Line, ...], head: Mapping[str, Any]) -> Schedule:
        """Return the schedule once its values are checked; `check` proves whether it runs."""
        if not order:
            raise BadInput("stages", [], "it has to be at least 1 stage")
        for key, value in head.items():
            if key in ("policy", "why"):
                if not isinstance(value, str):
                    raise BadInput(key, value, "it has to be a text")
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadInput(key, value, "it has to be a whole number of at least 1")
        for op in (op for line in order for op in line):
            if not op.kind.computes:
                allowed = "a schedule holds F, B, I, W and R; the rest is derived"
                raise BadInput("op", str(op), allowed)
        schedule = cls(order, **head)
        if schedule.replicas > 1:
            schedule._check_replicas()
        return schedule

    def _check_replicas(self) -> None:
        if self.chunks > 1:
            raise BadInput("chunks", self.chunks, "it has to be 1 where there are several replicas")
        for op in (op for line in self.order for op in line):
            if op.home is None or op.home >= self.replicas:
                allowed = (
                    f"an op of several replicas ends with its home, @0 to @{self.replicas - 1}"
                )
                raise BadInput("op", str(op), allowed)

    def digest(self) -> str:
        """SHA-256 of the text form: equal digests mean equal schedules."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def _head(self) -> dict[str, Any]:
        keys = _HEAD if self.replicas == 1 else (_REPLICAS, *_HEAD)
        return {key: getattr(self, key) for key in keys}

    def _names(self) -> list[str]:
        return _names(len(self.order), self.replicas)


def _names(workers: int, replicas: object) -> list[str]:
    """Return the word that each line begins with: stage, or replica and stage. Raises BadInput."""
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise BadInput(_REPLICAS, replicas, "it has to be a whole number of at least 1")
    if workers % replicas:
        raise BadInput(_REPLICAS, replicas, f"it has to divide the number of workers, {workers}")
    if replicas == 1:
        return [str(stage) for stage in range(workers)]
    return [worker_name(worker, workers // replicas) for worker in range(workers)]


def in_flight(line: Sequence[Op], chunks: int = 1) -> list[float]:
    """Return the activations that one stage holds after each op of `line`, in microbatches.

    A microbatch counts 1 on the whole stage; each of several `chunks` has an equal share of that.
    """
    recomputed = recomputed_of(line)
    held, out = 0.0, []
    for op in line:
        if op.kind is Kind.F:
            held += RECOMPUTED_SHARE if op[1:] in recomputed else 1.0
        else:
            held += _CHANGE.get(op.kind, 0.0)
        out.append(round(held / chunks, 9))
    return out


def peak_in_flight(line: Sequence[Op], chunks: int = 1) -> float:
    """The most activations held at once by one stage that runs `line`, in microbatches.

    `chunks`: how many the stage has.
    """
    return max(in_flight(line, chunks), default=0.0)


def warmup_of(line: Sequence[Op]) -> int:
    """Forwards before the first backward; all of them when there is no backward."""
    forwards = 0
    for op in line:
        if op.kind in (Kind.B, Kind.I):
            break
        forwards += op.kind is Kind.F
    return forwards


def warmup_line(depth: int, microbatches: int) -> Line:
    """`depth` forwards, then backward and forward in turn, then the backwards that are left.

    This is the order Megatron's schedule runs with `depth - 1` warmup microbatches, for so many
    `microbatches` in all.
    """
    depth = max(1, min(depth, microbatches))
    line = [Op(Kind.F, i) for i in range(depth)]
    for i in range(microbatches - depth):
        line += [Op(Kind.B, i), Op(Kind.F, depth + i)]
    line += [Op(Kind.B, i) for i in range(microbatches - depth, microbatches)]
    return tuple(line)


def parse_line(words: Iterable[str]) -> Line:
    """The ops of one stage, from their text forms, `words`; raises BadInput."""
    return tuple(Op.parse(word) for word in words)
