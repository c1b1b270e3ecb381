"""Timelines as a Chrome trace: open the JSON in ui.perfetto.dev or chrome://tracing.

One process per timeline, one thread per stage. Each message is an arrow from the op that made it
to the op that used it, and a bar on an asynchronous track of its directed link, since several
messages can be under way on one link at once. Where it was measured, another such track shows how
long each receive stood posted: the bars above each other are the depth of posting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.timeline import Message, Span, Timeline
from megatron_adaptra.view.theme import op_name

Event = dict[str, Any]
_FORWARD = frozenset({Kind.F, Kind.SEND_F, Kind.POST_F})
_BACKWARD = frozenset({Kind.B, Kind.I})


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The trace as an object for json.dump; `timelines` maps a process's name to its timeline."""
    events: list[Event] = []
    for pid, (name, timeline) in enumerate(timelines.items(), start=1):
        events += _names(pid, name, timeline)
        events += [_complete(pid, span) for span in timeline.spans]
        find = _Ops(timeline)
        for i, message in enumerate(timeline.messages):
            identity = f"{pid}.{i}"
            events += _flight(pid, identity, message)
            events += _arrow(pid, identity, message, find)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(pid: int, name: str, timeline: Timeline) -> list[Event]:
    def meta(what: str, tid: int, **args: object) -> Event:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}

    events = [meta("process_name", 0, name=name), meta("process_sort_index", 0, sort_index=pid)]
    for stage in range(timeline.stages):
        events.append(meta("thread_name", stage + 1, name=f"stage {stage}"))
        events.append(meta("thread_sort_index", stage + 1, sort_index=stage))
    return events


def _complete(pid: int, span: Span) -> Event:
    return {
        "ph": "X",
        "name": str(span.op),
        "cat": op_name(span.op.kind),
        "pid": pid,
        "tid": span.stage + 1,
        "ts": _us(span.start),
        "dur": _us(span.end - span.start),
        "args": {"microbatch": span.op.microbatch, "chunk": span.op.chunk},
    }


def _flight(pid: int, identity: str, message: Message) -> list[Event]:
    link = {
        "name": f"link {message.source} to {message.target}",
        "cat": "link",
        "id": identity,
        "pid": pid,
        "tid": 0,
    }
    bars = [(link, message.sent)]
    if message.posted is not None:
        name = f"receives posted, {message.source} to {message.target}"
        bars.append(({**link, "name": name, "cat": "posted"}, message.posted))
    return [
        event
        for bar, begin in bars
        for event in (
            {**bar, "ph": "b", "ts": _us(begin), "args": {"op": str(message.op)}},
            {**bar, "ph": "e", "ts": _us(message.arrived)},
        )
    ]


def _arrow(pid: int, identity: str, message: Message, find: _Ops) -> list[Event]:
    """A flow binds to the slice that is open at its time, so its ends are the slices' starts."""
    made, used = find.ends(message)
    if made is None or used is None:
        return []
    flow = {"name": "message", "cat": "message", "id": identity, "pid": pid}
    return [
        {**flow, "ph": "s", "tid": made.stage + 1, "ts": _us(made.start)},
        {**flow, "ph": "f", "bp": "e", "tid": used.stage + 1, "ts": _us(used.start)},
    ]


class _Ops:
    """Finds the spans at the two ends of a message."""

    def __init__(self, timeline: Timeline) -> None:
        self.stages = timeline.stages
        self.spans: dict[tuple[bool, int, int], Span] = {}
        for span in timeline.spans:
            forward = span.op.kind is Kind.F
            if forward or span.op.kind in _BACKWARD:
                position = span.op.chunk * self.stages + span.stage
                self.spans[forward, position, span.op.microbatch] = span

    def ends(self, message: Message) -> tuple[Span | None, Span | None]:
        forward = message.op.kind in _FORWARD
        here = message.op.chunk * self.stages + message.source
        there = here + 1 if forward else here - 1
        return (
            self.spans.get((forward, here, message.op.microbatch)),
            self.spans.get((forward, there, message.op.microbatch)),
        )


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
