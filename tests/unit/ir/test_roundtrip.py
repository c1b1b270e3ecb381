"""Whatever is written down is read back exactly."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir.strategies import conditions, ops, schedules, seconds
from read_timeline import timeline_of

from benchmarks.common import both_ways
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Message, Span, Timeline


def through_json(data):
    return json.loads(json.dumps(data, allow_nan=False))


spans = st.lists(st.builds(Span, st.integers(0, 9), ops, seconds, seconds)).map(tuple)
messages = st.lists(
    st.builds(
        Message, st.integers(0, 9), st.integers(0, 9), ops, seconds, seconds, st.none() | seconds
    )
).map(tuple)


@given(ops)
def test_an_op_reads_back(op):
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("F3", Op(Kind.F, 3)),
        ("I12.1", Op(Kind.I, 12, 1)),
        ("F3@2", Op(Kind.F, 3, 0, 2)),
        ("SB0.2@0", Op(Kind.SEND_B, 0, 2, 0)),
    ],
)
def test_op_text(text, op):
    assert (str(op), Op.parse(text)) == (text, op)


@pytest.mark.parametrize(
    "text", ["", "F", "3", "f3", "Q3", "F-1", "F3.", "F3@", "F3 ", "F٣", "FF3"]
)
def test_what_is_no_op_is_refused(text):
    with pytest.raises(BadInput, match=r"^op "):
        Op.parse(text)


@given(schedules)
def test_a_schedule_reads_back(schedule):
    assert Schedule.parse(schedule.text()) == schedule
    assert Schedule.from_json(through_json(schedule.to_json())) == schedule
    assert Schedule.parse(schedule.text()).digest() == schedule.digest()


@given(schedules, schedules)
def test_digests_differ_where_schedules_do(a, b):
    assert (a.digest() == b.digest()) == (a == b)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "schedule",
        "schedule {}\n",
        "schedule []\n",
        'schedule {"microbatches": 1}\n',
        'program {"microbatches": 1, "chunks": 1, "policy": "", "why": ""}\n',
        'schedule {"microbatches": 1, "chunks": 1, "policy": "", "why": ""}\n1: F0 B0\n',
        'schedule {"microbatches": 1, "chunks": 1, "policy": "", "why": ""}\n0: F0 Q0\n',
    ],
)
def test_what_is_no_schedule_is_refused(text):
    with pytest.raises(BadInput):
        Schedule.parse(text)


@given(conditions())
def test_conditions_read_back(c):
    assert Conditions.from_json(through_json(c.to_json())) == c


@given(spans, messages, st.text())
def test_a_timeline_reads_back(spans, messages, name):
    timeline = Timeline(spans, messages, name)
    assert timeline_of(through_json(timeline.to_json())) == timeline


nan, inf = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("stages", {"forward": ()}),
        ("microbatches", {"microbatches": 0}),
        ("forward", {"forward": (1.0, -1.0)}),
        ("forward", {"forward": (nan, 1.0)}),
        ("backward_input", {"backward_input": (1.0,)}),
        ("backward_weight", {"backward_weight": (inf, 1.0)}),
        ("activation_budget", {"activation_budget": (0.5, 2.0)}),
        ("activation_budget", {"activation_budget": (nan, 2.0)}),
        ("activation_budget", {"activation_budget": (2.0,)}),
        ("link 0>1", {"links": {(0, 1): LinkState(-1.0)}}),
        ("link 0>1", {"links": {(0, 1): LinkState(nan)}}),
        ("link 0>1", {"links": {(0, 1): LinkState(inf)}}),
        ("link 0>1", {"links": {(0, 1): LinkState(0.0, 0.0)}}),
        ("link", {"links": {(1, 2): LinkState(1.0)}}),
        ("link", {"links": {(1, 1): LinkState(1.0)}}),
        ("cores", {"cores": 0.0}),
        ("cores", {"cores": inf}),
        ("core_share", {"core_share": (0.5,)}),
        ("core_share", {"core_share": (0.5, 1.5)}),
        ("core_share", {"core_share": (nan, 0.5)}),
        ("step_seconds", {"step_seconds": nan}),
        ("message_bytes", {"message_bytes": -1.0}),
        ("port", {"ports": {2: 1.0}}),
        ("port 1", {"ports": {1: 0.0}}),
        ("port 0", {"ports": {0: nan}}),
    ],
)
def test_conditions_refuse(field, change):
    good = {
        "microbatches": 4,
        "forward": (1.0, 1.0),
        "backward_input": (1.0, 1.0),
        "backward_weight": (1.0, 1.0),
    }
    Conditions(**good)
    with pytest.raises(BadInput) as caught:
        Conditions(**{**good, **change})
    assert caught.value.field == field


def test_both_ways():
    assert both_ways([0.1, 0.2]) == both_ways({0: 0.1, 1: 0.2})
    assert both_ways({1: 0.2}) == {(1, 2): LinkState(0.2), (2, 1): LinkState(0.2)}
