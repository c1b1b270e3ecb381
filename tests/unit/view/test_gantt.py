"""Gantt and line chart: complete, to scale, escaped."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

from view_sample import measured, plan

from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.timeline import Message, Span, Timeline
from megatron_adaptra.view.pipeline import CATEGORY, pipeline_gantt
from megatron_adaptra.view.svg.gantt import gantt_svg
from megatron_adaptra.view.theme import MESSAGE, lighter

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert('&')</script>"


def timeline_svg(timeline: Timeline, seconds: float | None = None, **style: Any) -> str:
    return gantt_svg(pipeline_gantt(timeline), seconds, **style)


def boxes(svg: str) -> dict[str, tuple[float, float, float]]:
    """What a box's tooltip says -> its x, y, width."""
    out = {}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        if title is not None and rect is not None:
            x, y, width = (float(rect.get(key, "nan")) for key in ("x", "y", "width"))
            out[f"{title.text} row {y}"] = (x, y, width)
    return out


def test_every_op_has_a_box_with_its_times() -> None:
    timeline = measured(plan("warmup").timeline)
    found = boxes(timeline_svg(timeline))
    assert len(found) == len(timeline.spans)
    for microbatch in range(12):
        for kind in "FB":
            assert sum(key.startswith(f"{kind}{microbatch} ") for key in found) == 4
    assert all("start" in key and "duration" in key and " ms" in key for key in found)


def test_common_scale_puts_one_instant_at_one_x() -> None:
    short = Timeline((Span(0, Op(Kind.F, 0), 0.0, 0.1), Span(0, Op(Kind.B, 0), 0.2, 0.3)))
    long = Timeline((*short.spans, Span(0, Op(Kind.F, 1), 0.3, 0.9)))
    a, b = boxes(timeline_svg(short, 1.0)), boxes(timeline_svg(long, 1.0, row=12))
    xs_a, xs_b = sorted(x for x, _, _ in a.values()), sorted(x for x, _, _ in b.values())
    assert xs_a == xs_b[:2]
    alone = sorted(x for x, _, _ in boxes(timeline_svg(short)).values())
    assert alone[1] > xs_a[1]


def test_times_count_from_the_first_start() -> None:
    spans = (Span(0, Op(Kind.F, 0), 100.0, 100.1), Span(0, Op(Kind.B, 0), 100.2, 100.3))
    early = tuple(Span(s.stage, s.op, s.start - 100, s.end - 100) for s in spans)
    late = sorted(x for x, _, _ in boxes(timeline_svg(Timeline(spans))).values())
    assert late == sorted(x for x, _, _ in boxes(timeline_svg(Timeline(early))).values())


def test_text_appears_where_there_is_room() -> None:
    spans = (Span(0, Op(Kind.F, 7), 0.0, 0.5), Span(0, Op(Kind.F, 8), 0.5, 0.5001))
    words = [e.text for e in ET.fromstring(timeline_svg(Timeline(spans))).iter(f"{SVG}text")]
    assert "F7" in words
    assert "F8" not in words
    assert "8" not in words


def test_only_slow_messages_are_drawn_and_they_slant() -> None:
    span = Span(0, Op(Kind.F, 0), 0.0, 1.0)
    fast = Message(0, 1, Op(Kind.F, 0), 0.0, 0.001)
    slow = Message(0, 1, Op(Kind.F, 1), 0.2, 0.6)
    timeline = Timeline((span, span._replace(stage=1)), (fast, slow))
    lines = [
        e
        for e in ET.fromstring(timeline_svg(timeline)).iter(f"{SVG}line")
        if e.get("stroke") == MESSAGE
    ]
    assert len(lines) == 1
    line = {key: float(lines[0].get(key, "nan")) for key in ("x1", "x2", "y1", "y2")}
    assert line["x1"] < line["x2"]
    assert line["y1"] < line["y2"]


def test_each_kind_has_a_colour_of_its_own() -> None:
    spans = tuple(Span(0, Op(kind, 0), i, i + 1) for i, kind in enumerate(CATEGORY))
    svg = timeline_svg(Timeline(spans))
    fills = {category.fill for category in CATEGORY.values()}
    assert len(fills) == len(CATEGORY)
    assert all(fill in svg for fill in fills)


def test_empty_timeline_and_evil_title() -> None:
    svg = timeline_svg(Timeline(()), title=EVIL)
    assert "<script" not in svg
    assert any(e.text == "nothing ran" for e in ET.fromstring(svg).iter(f"{SVG}text"))


def test_later_chunks_are_lighter_but_no_other_kinds_colour() -> None:
    fills = {
        (kind, chunk): lighter(category.fill, chunk)
        for kind, category in CATEGORY.items()
        for chunk in range(4)
    }
    assert len(set(fills.values())) == len(fills)
    for kind in CATEGORY:
        light = [int(fills[kind, chunk][1:3], 16) for chunk in range(4)]
        assert light == sorted(light)


def test_a_drawing_alone_has_a_legend_colours_and_a_margin() -> None:
    spans = (Span(0, Op(Kind.F, 0), 0.0, 1.0), Span(0, Op(Kind.W, 0, 1), 1.0, 2.0))
    alone = ET.fromstring(timeline_svg(Timeline(spans), alone=True))
    words = [e.text for e in alone.iter(f"{SVG}text")]
    assert {"F forward", "W weight gradient", "chunk 0, 1"} <= set(words)
    assert "prefers-color-scheme" in (alone.findtext(f"{SVG}style") or "")
    x, y, width, height = map(float, (alone.get("viewBox") or "").split())
    assert x == y < 0
    assert (width, height) == (float(alone.get("width", "0")), float(alone.get("height", "0")))
    inside = ET.fromstring(timeline_svg(Timeline(spans)))
    assert inside.find(f"{SVG}style") is None


def test_the_mark_stands_at_the_given_end() -> None:
    """The last stage's weight gradient ends after the first stage has ended."""
    spans = (Span(0, Op(Kind.F, 0), 0.0, 1.0), Span(1, Op(Kind.W, 0), 1.0, 3.0))
    timeline = Timeline(spans)
    for end, label in ((None, "1000 ms"), (timeline.makespan, "3000 ms")):
        svg = gantt_svg(pipeline_gantt(timeline, end))
        words = [e.text for e in ET.fromstring(svg).iter(f"{SVG}text")]
        assert label in words
