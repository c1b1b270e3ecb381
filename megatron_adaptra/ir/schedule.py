"""The order of compute ops on every stage: plain data that planners return."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.in_flight import peak_in_flight
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.user_files import parse_json

Line = tuple[Op, ...]
STOCK = "stock"  # the policy of a schedule that Megatron runs itself, over its own messages
_HEAD = ("microbatches", "chunks", "policy", "why")  # all but the ops


@dataclass(frozen=True)
class Schedule:
    """`order[i]` is what stage i runs, in order. `why` is one sentence for people."""

    order: tuple[Line, ...]
    microbatches: int
    chunks: int = 1
    policy: str = ""
    why: str = ""

    @property
    def stages(self) -> int:
        """How many devices the pipeline has."""
        return len(self.order)

    @property
    def stock(self) -> bool:
        """Whether Megatron runs it over messages of its own, and not over ours."""
        return self.policy == STOCK

    def same_as(self, other: Schedule) -> bool:
        """Whether `other` means the same ops in the same order over the same messages."""
        return self.stock == other.stock and self.order == other.order

    @property
    def warmup(self) -> tuple[int, ...]:
        """Per stage, the forwards it runs before its first backward."""
        return tuple(warmup_of(line) for line in self.order)

    def peak_in_flight(self) -> tuple[float, ...]:
        """Per stage, the most activations held at once, in microbatches."""
        return tuple(peak_in_flight(line, self.chunks) for line in self.order)

    def text(self) -> str:
        """One head line, then one line per stage; `parse` reads it back exactly."""
        rows = [f"schedule {json.dumps(self._head(), sort_keys=True)}"]
        rows += [f"{i}: {' '.join(map(str, line))}".rstrip() for i, line in enumerate(self.order)]
        return "\n".join(rows) + "\n"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule of a `text` that `text()` has written; raises BadInput for any other."""
        first, *rows = text.splitlines() or [""]
        word, _, head = first.partition(" ")
        if word != "schedule":
            raise BadInput("schedule", first, "the first line starts with 'schedule'")
        order = []
        for i, row in enumerate(rows):
            stage, colon, ops = row.partition(":")
            if stage != str(i) or not colon:
                raise BadInput("schedule", row, f"line {i + 2} starts with '{i}:'")
            order.append(parse_line(ops.split()))
        try:
            values = parse_json(head)
        except ValueError:
            values = None
        if not isinstance(values, dict) or values.keys() != set(_HEAD):
            allowed = f"the first line ends with a JSON object of {', '.join(_HEAD)}"
            raise BadInput("schedule", first, allowed)
        return cls._checked(tuple(order), values)

    def to_json(self) -> dict[str, Any]:
        """As an object for json.dump; `stages` holds the text forms of the ops."""
        return {**self._head(), "stages": [[str(op) for op in line] for line in self.order]}

    @classmethod
    def from_json(cls, data: object) -> Schedule:
        """What `to_json` has made of a schedule, or a plan: `data`, read from JSON.

        What a plan leaves out, its number of microbatches and chunks, its ops show. Raises
        BadInput for anything else.
        """
        if not isinstance(data, Mapping):
            raise BadInput(
                "schedule", data, "it has to be an object with stages, microbatches and chunks"
            )
        stages = data.get("stages")
        if not isinstance(stages, list) or not all(
            isinstance(line, list) and all(isinstance(op, str) for op in line) for line in stages
        ):
            raise BadInput("stages", stages, "it has to be a list per stage of ops such as 'F3'")
        order = tuple(parse_line(line) for line in stages)
        known: dict[str, Any] = {
            "microbatches": 1 + max((op.microbatch for line in order for op in line), default=0),
            "chunks": 1 + max((op.chunk for line in order for op in line), default=0),
            "policy": "",
            "why": "",
        }
        return cls._checked(order, {key: data.get(key, known[key]) for key in _HEAD})

    @classmethod
    def _checked(cls, order: tuple[Line, ...], head: Mapping[str, Any]) -> Schedule:
        """The schedule, if it can be one: `check` proves whether it runs."""
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
        return cls(order, **head)

    def digest(self) -> str:
        """SHA-256 of the text form: equal digests mean equal schedules."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def _head(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in _HEAD}


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
