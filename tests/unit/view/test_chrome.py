"""The Chrome trace holds every span at its time and every message as an arrow and a bar."""

from __future__ import annotations

import json

from view_sample import measured, plan

from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.timeline import Message, Span, Timeline
from megatron_adaptra.view.chrome import Event, chrome_trace
from megatron_adaptra.view.pipeline import pipeline_gantt


def events_of(timeline: Timeline) -> list[Event]:
    events: list[Event] = chrome_trace({"a": pipeline_gantt(timeline)})["traceEvents"]
    return events


def test_every_span_is_there_at_its_time() -> None:
    timelines = {
        "stock measured": measured(plan("1f1b").timeline),
        "plan": plan("warmup").timeline,
    }
    gantts = {name: pipeline_gantt(timeline) for name, timeline in timelines.items()}
    trace = json.loads(json.dumps(chrome_trace(gantts), allow_nan=False))
    names = {
        e["args"]["name"]: e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name"
    }
    assert list(names) == list(timelines)
    for name, timeline in timelines.items():
        found = {
            (e["tid"] - 1, e["name"]): (e["ts"], e["dur"])
            for e in trace["traceEvents"]
            if e["ph"] == "X" and e["pid"] == names[name]
        }
        assert len(found) == len(timeline.spans)
        for span in timeline.spans:
            ts, dur = found[span.stage, str(span.op)]
            assert abs(ts - 1e6 * span.start) < 0.01
            assert abs(dur - 1e6 * (span.end - span.start)) < 0.01


def test_threads_are_named_and_sorted_by_stage() -> None:
    events = events_of(plan("1f1b").timeline)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert [names[tid] for tid in sorted(order, key=order.__getitem__)] == [
        f"stage {i}" for i in range(4)
    ]


def test_each_message_joins_its_two_ops() -> None:
    timeline = plan("warmup").timeline
    events = events_of(timeline)
    starts = {(e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    origins = {e["id"]: e for e in events if e["ph"] == "s"}
    heads = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(origins) == len(heads) == len(timeline.messages)
    for identity, origin in origins.items():
        head = heads[identity]
        assert head["bp"] == "e"
        assert abs(head["tid"] - origin["tid"]) == 1
        assert starts[origin["tid"], origin["ts"]] == starts[head["tid"], head["ts"]]
        assert origin["ts"] < head["ts"]


def test_flight_takes_the_links_delay() -> None:
    timeline = plan("1f1b").timeline
    events = events_of(timeline)
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "e"}
    flights = [
        ends[e["id"]] - e["ts"] for e in events if e["ph"] == "b" and e["name"] == "link 2 to 3"
    ]
    assert len(flights) == 12
    assert all(abs(us - 40_000) < 1 for us in flights)


def test_message_wraps_to_the_next_chunk() -> None:
    spans = (Span(1, Op(Kind.F, 0, 0), 0.0, 1.0), Span(0, Op(Kind.F, 0, 1), 2.0, 3.0))
    timeline = Timeline(spans, (Message(1, 0, Op(Kind.F, 0, 0), 1.0, 2.0),))
    arrows = [e for e in events_of(timeline) if e["ph"] in "sf"]
    assert [(e["ph"], e["tid"], e["ts"]) for e in arrows] == [("s", 2, 0.0), ("f", 1, 2e6)]


def test_message_without_its_ops_has_no_arrow() -> None:
    timeline = Timeline((), (Message(0, 1, Op(Kind.F, 0), 0.0, 1.0),))
    assert [e["ph"] for e in events_of(timeline)] == ["M", "M", "b", "e"]


def test_receives_that_stand_posted_have_a_track() -> None:
    messages = [Message(0, 1, Op(Kind.F, i), 1.0 + i, 2.0 + i, 0.5) for i in range(3)]
    events = events_of(Timeline((), tuple(messages)))
    track = [e for e in events if e["name"] == "receives posted, 0 to 1"]
    assert [e["ts"] for e in track if e["ph"] == "b"] == [5e5] * 3  # one above the other
    assert [e["ts"] for e in track if e["ph"] == "e"] == [2e6, 3e6, 4e6]
