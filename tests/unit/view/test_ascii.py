"""ASCII pictures and number texts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from view_sample import measured, plan

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Span, Timeline
from megatron_adaptra.view.ascii import ascii_gantt, ascii_legend
from megatron_adaptra.view.axis import ms, number, round_up, ticks
from megatron_adaptra.view.pipeline import pipeline_gantt
from megatron_adaptra.view.schedule_grid import ascii_schedule


def text_of(timeline: Timeline, width: int = 100) -> str:
    return ascii_gantt(pipeline_gantt(timeline), width)


@settings(max_examples=30, deadline=None)
@given(width=st.integers(32, 300), policy=st.sampled_from(["1f1b", "warmup", "zb-h2"]))
def test_no_line_is_wider_than_asked(width: int, policy: str) -> None:
    picture = text_of(measured(plan(policy).timeline), width)
    assert max(map(len, picture.splitlines())) <= width


def test_wide_enough_timeline_shows_every_op_of_its_stage() -> None:
    timeline = plan("warmup").timeline
    rows = text_of(timeline, 700).splitlines()
    for span in timeline.spans:
        if span.op.kind.computes:
            assert str(span.op) in rows[1 + span.stage]
    assert "stage 3" in rows[4]


def test_ops_stand_in_proportion_to_time() -> None:
    spans = (Span(0, Op(Kind.F, 0), 0.0, 0.01), Span(0, Op(Kind.B, 0), 0.03, 0.04))
    row = text_of(Timeline(spans), 50).splitlines()[1]
    cells = row.partition("|")[2].rstrip("|")
    assert row.startswith("stage 0 |F0-")
    assert cells.index("B0") == round(0.75 * len(cells))
    assert set(cells[len(cells) // 4 + 1 : cells.index("B0")]) == {"."}


def test_row_with_more_ops_than_room_says_so() -> None:
    spans = tuple(Span(0, Op(Kind.F, i), 0.001 * i, 0.001 * (i + 1)) for i in range(200))
    row = text_of(Timeline(spans), 60).splitlines()[1]
    assert len(row) == 60
    assert row.endswith(">|")


def test_empty_timeline_and_absurd_width() -> None:
    assert "nothing ran" in text_of(Timeline((), name="measured"))
    with pytest.raises(BadInput, match="width"):
        text_of(Timeline(()), 5)


def test_instant_timeline_is_drawn() -> None:
    assert "stage 0" in text_of(Timeline((Span(0, Op(Kind.F, 0), 0.0, 0.0),)))


def test_schedule_grid_keeps_order_and_dependencies() -> None:
    schedule = plan("1f1b").schedule
    head, *rows = ascii_schedule(schedule).splitlines()
    assert "1f1b" in head
    assert "4,3,2,1" in head
    for stage, row in enumerate(rows):
        words = [w for w in row.partition("|")[2].split() if w != "."]
        assert words == [str(op) for op in schedule.order[stage]]
    at = [row.index("F5") for row in rows]
    assert at == sorted(at)
    assert len(set(at)) == 4


def test_schedule_that_deadlocks_is_still_shown() -> None:
    order = ((Op(Kind.B, 0), Op(Kind.F, 0)), (Op(Kind.F, 0), Op(Kind.B, 0)))
    picture = ascii_schedule(Schedule(order, 1))
    assert "B0?" in picture
    assert "F0?" in picture


def test_numbers_read_well() -> None:
    assert [number(v) for v in (0, 0.1234, 1.5, 12.345, 660.4, 123456.0)] == [
        "0",
        "0.123",
        "1.5",
        "12.3",
        "660",
        "123456",
    ]
    assert ms(0.0402) == "40.2 ms"


@given(st.floats(1e-6, 1e9))
def test_ticks_are_even_and_within(top: float) -> None:
    marks = ticks(top)
    assert marks[0] == 0
    assert 3 <= len(marks) <= 10
    assert marks[-1] <= top * (1 + 1e-6)
    assert round_up(top) >= top * (1 - 1e-6)


def test_later_chunks_look_different_however_narrow() -> None:
    spans = (Span(0, Op(Kind.F, 3), 0.0, 1.0), Span(0, Op(Kind.F, 3, 1), 1.0, 2.0))
    filler = Span(0, Op(Kind.F, 0), 2.0, 90.0)
    rows = [text_of(Timeline((*spans, filler)), width).splitlines()[1] for width in (400, 220, 60)]
    assert "F3--F3.1" in rows[0]
    assert "F3f3" in rows[1]
    assert "Ff" in rows[2]


def test_legend_names_what_occurs() -> None:
    kinds = (Kind.F, Kind.I, Kind.W, Kind.R)
    spans = tuple(Span(0, Op(kind, 0), i, i + 1.0) for i, kind in enumerate(kinds))
    legend = ascii_legend(pipeline_gantt(Timeline(spans)))
    for words in ("F0-- forward", "I0~~ input gradient", "W0++ weight gradient", "R0** recompute"):
        assert words in legend
    assert "backward" not in legend
    assert "chunk" not in legend
    later = Span(0, Op(Kind.F, 0, 1), 9.0, 10.0)
    assert "later chunk" in ascii_legend(pipeline_gantt(Timeline((*spans, later))))
