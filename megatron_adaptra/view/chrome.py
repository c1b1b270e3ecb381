"""Gantts as a Chrome trace: open the JSON in ui.perfetto.dev or chrome://tracing.

One process per Gantt, one thread per row. Each message is an arrow from the bar that made it to the
bar that used it, and a bar on an asynchronous track of its directed link, since several messages
can be under way on one link at once. Where it was measured, another such track shows how long each
receive stood posted: the bars above each other are the depth of posting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_adaptra.view.bars import Arrow, Bar, Gantt

Event = dict[str, Any]


def chrome_trace(gantts: Mapping[str, Gantt]) -> dict[str, Any]:
    """The trace as an object for json.dump, with times in microseconds, as the format has them.

    Args:
        gantts: what each process of the trace shows, by the process's name.
    """
    events: list[Event] = []
    for pid, (name, gantt) in enumerate(gantts.items(), start=1):
        events += _names(pid, name, gantt)
        events += [_complete(pid, bar) for bar in gantt.bars]
        for i, arrow in enumerate(gantt.arrows):
            identity = f"{pid}.{i}"
            events += _flight(pid, identity, arrow, gantt)
            if arrow.joins is not None:
                made, used = (gantt.bars[at] for at in arrow.joins)
                events += _arrow(pid, identity, made, used)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(pid: int, name: str, gantt: Gantt) -> list[Event]:
    def meta(what: str, tid: int, **args: object) -> Event:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}

    events = [meta("process_name", 0, name=name), meta("process_sort_index", 0, sort_index=pid)]
    for row in range(gantt.rows):
        events.append(meta("thread_name", row + 1, name=gantt.row_title(row)))
        events.append(meta("thread_sort_index", row + 1, sort_index=row))
    return events


def _complete(pid: int, bar: Bar) -> Event:
    return {
        "ph": "X",
        "name": bar.label,
        "cat": bar.category.name,
        "pid": pid,
        "tid": bar.row + 1,
        "ts": _us(bar.start),
        "dur": _us(bar.end - bar.start),
        "args": dict(bar.details),
    }


def _flight(pid: int, identity: str, arrow: Arrow, gantt: Gantt) -> list[Event]:
    way = f"{gantt.short_name(arrow.source)} to {gantt.short_name(arrow.target)}"
    link = {
        "name": f"link {way}",
        "cat": "link",
        "id": identity,
        "pid": pid,
        "tid": 0,
    }
    bars = [(link, arrow.sent)]
    if arrow.posted is not None:
        bars.append(({**link, "name": f"receives posted, {way}", "cat": "posted"}, arrow.posted))
    return [
        event
        for bar, begin in bars
        for event in (
            {**bar, "ph": "b", "ts": _us(begin), "args": {"op": arrow.label}},
            {**bar, "ph": "e", "ts": _us(arrow.arrived)},
        )
    ]


def _arrow(pid: int, identity: str, made: Bar, used: Bar) -> list[Event]:
    """A flow binds to the slice that is open at its time, so its ends are the slices' starts."""
    flow = {"name": "message", "cat": "message", "id": identity, "pid": pid}
    return [
        {**flow, "ph": "s", "tid": made.row + 1, "ts": _us(made.start)},
        {**flow, "ph": "f", "bp": "e", "tid": used.row + 1, "ts": _us(used.start)},
    ]


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
