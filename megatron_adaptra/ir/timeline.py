"""When each op ran: one type for predicted and for measured iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_adaptra.ir.op import Kind, Op


class Span(NamedTuple):
    """`op` ran on `stage` from `start` to `end`, in seconds from the iteration's start."""

    stage: int
    op: Op
    start: float
    end: float


class Message(NamedTuple):
    """The output of `op` left `source` and was there for `target`, in seconds."""

    source: int
    target: int
    op: Op
    sent: float
    arrived: float


@dataclass(frozen=True)
class Timeline:
    spans: tuple[Span, ...]
    messages: tuple[Message, ...] = ()
    name: str = ""

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(s.end for s in self.spans) - min(s.start for s in self.spans)

    @property
    def stages(self) -> int:
        return 1 + max((s.stage for s in self.spans), default=-1)

    def busy(self, stage: int) -> float:
        """Seconds of compute on a stage; its tail does not count."""
        return sum(s.end - s.start for s in self.spans if s.stage == stage and s.op.kind.computes)

    def peak_in_flight(self) -> tuple[float, ...]:
        """Per stage, the most activations held at once (units of design: one microbatch)."""
        peaks = []
        for stage in range(self.stages):
            line = [s.op for s in sorted((s for s in self.spans if s.stage == stage), key=_start)]
            peaks.append(peak_in_flight(line))
        return tuple(peaks)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "spans": [[s.stage, str(s.op), s.start, s.end] for s in self.spans],
            "messages": [[m.source, m.target, str(m.op), m.sent, m.arrived] for m in self.messages],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timeline:
        return cls(
            tuple(Span(s, Op.parse(op), a, b) for s, op, a, b in data["spans"]),
            tuple(Message(s, t, Op.parse(op), a, b) for s, t, op, a, b in data["messages"]),
            data["name"],
        )


INPUT_HALF = 0.5  # share of a microbatch's activations that the input-gradient half gives back
LIGHT = 0.05  # what a light microbatch (one that will be recomputed) holds until its R


def peak_in_flight(line: list[Op] | tuple[Op, ...]) -> float:
    """The most activations held at once by one stage that runs `line`, in microbatches."""
    light = {(op.microbatch, op.chunk) for op in line if op.kind is Kind.R}
    held = peak = 0.0
    for op in line:
        is_light = (op.microbatch, op.chunk) in light
        held += {
            Kind.F: LIGHT if is_light else 1.0,
            Kind.R: 1.0 - LIGHT,
            Kind.B: -1.0,
            Kind.I: -INPUT_HALF,
            Kind.W: INPUT_HALF - 1.0,
        }.get(op.kind, 0.0)
        peak = max(peak, held)
    return round(peak, 9)


def _start(span: Span) -> float:
    return span.start
