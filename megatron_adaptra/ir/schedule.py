"""The order of compute ops on every stage: plain data that planners return."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.op import Kind, Op

Line = tuple[Op, ...]


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
        return len(self.order)

    @property
    def warmup(self) -> tuple[int, ...]:
        """Per stage, the forwards it runs before its first backward."""
        return tuple(warmup_of(line) for line in self.order)

    def text(self) -> str:
        """One head line, then one line per stage; `parse` reads it back exactly."""
        return _text("schedule", self._head(), self.order)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        head, order = _parse("schedule", text, ("microbatches", "chunks", "policy", "why"))
        return cls(order, **head)

    def to_json(self) -> dict[str, Any]:
        return {**self._head(), "stages": [[str(op) for op in line] for line in self.order]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        order = tuple(parse_line(line) for line in data["stages"])
        return cls(order, **{k: data[k] for k in ("microbatches", "chunks", "policy", "why")})

    def digest(self) -> str:
        """SHA-256 of the text form: equal digests mean equal schedules."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def _head(self) -> dict[str, Any]:
        return {
            "microbatches": self.microbatches,
            "chunks": self.chunks,
            "policy": self.policy,
            "why": self.why,
        }


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

    This is the order Megatron's schedule runs with `depth - 1` warmup microbatches.
    """
    depth = max(1, min(depth, microbatches))
    line = [Op(Kind.F, i) for i in range(depth)]
    for i in range(microbatches - depth):
        line += [Op(Kind.B, i), Op(Kind.F, depth + i)]
    line += [Op(Kind.B, i) for i in range(microbatches - depth, microbatches)]
    return tuple(line)


def parse_line(words: Iterable[str]) -> Line:
    return tuple(Op.parse(word) for word in words)


def _text(noun: str, head: Mapping[str, Any], order: Sequence[Line]) -> str:
    rows = [f"{noun} {json.dumps(head, sort_keys=True)}"]
    rows += [f"{i}: {' '.join(map(str, line))}".rstrip() for i, line in enumerate(order)]
    return "\n".join(rows) + "\n"


def _parse(noun: str, text: str, keys: Sequence[str]) -> tuple[dict[str, Any], tuple[Line, ...]]:
    first, *rows = text.splitlines() or [""]
    word, _, head = first.partition(" ")
    if word != noun:
        raise BadInput(noun, first, f"the first line starts with '{noun}'")
    order = []
    for i, row in enumerate(rows):
        stage, colon, ops = row.partition(":")
        if stage != str(i) or not colon:
            raise BadInput(noun, row, f"line {i + 2} starts with '{i}:'")
        order.append(parse_line(ops.split()))
    try:
        values = json.loads(head)
    except ValueError:
        values = None
    if not isinstance(values, dict) or values.keys() != set(keys):
        allowed = f"the first line ends with a JSON object of {', '.join(keys)}"
        raise BadInput(noun, first, allowed)
    return values, tuple(order)
