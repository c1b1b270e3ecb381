"""Schedules and conditions of several replicas, written down and read back; what is refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir.strategies import replica_conditions, replica_schedules, schedules
from read_timeline import timeline_of

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule, warmup_line
from megatron_adaptra.ir.timeline import Span, Timeline

nan, inf = float("nan"), float("inf")


def through_json(data):
    return json.loads(json.dumps(data, allow_nan=False))


def refused(call, *args) -> BadInput:
    with pytest.raises(BadInput) as caught:
        call(*args)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


# --- schedules -----------------------------------------------------------------------------------


@given(replica_schedules())
def test_a_schedule_reads_back(schedule):
    again = Schedule.parse(schedule.text())
    assert again == schedule
    assert again.text() == schedule.text()
    assert again.digest() == schedule.digest()
    assert again.routes == schedule.routes
    assert Schedule.from_json(through_json(schedule.to_json())) == schedule


@given(replica_schedules(), replica_schedules() | schedules)
def test_digests_differ_where_schedules_do(a, b):
    assert (a.digest() == b.digest()) == (a == b)


def test_one_replica_reads_as_it_always_has():
    schedule = Schedule(
        tuple(warmup_line(depth, 4) for depth in (3, 2, 1)), 4, policy="1f1b", why="in turn"
    )
    assert schedule.text() == (
        'schedule {"chunks": 1, "microbatches": 4, "policy": "1f1b", "why": "in turn"}\n'
        "0: F0 F1 F2 B0 F3 B1 B2 B3\n"
        "1: F0 F1 B0 F2 B1 F3 B2 B3\n"
        "2: F0 B0 F1 B1 F2 B2 F3 B3\n"
    )
    assert schedule.digest() == "8ca857cbab577eeb6e21f77db6565801a5fb9f364db25f5c65c57721a96d9c21"
    assert list(schedule.to_json()) == ["microbatches", "chunks", "policy", "why", "stages"]


TWO = (
    'schedule {"chunks": 1, "microbatches": 1, "policy": "", "replicas": 2, "why": ""}\n'
    "0.0: F0@1 B0@1\n"
    "0.1: F0@0 B0@0\n"
    "1.0: F0@0 B0@0\n"
    "1.1: F0@1 B0@1\n"
)


def test_two_replicas_in_words():
    schedule = Schedule.parse(TWO)
    assert schedule.text() == TWO
    assert (schedule.replicas, schedule.stages) == (2, 2)
    assert schedule.routes.moved == {(0, 0, 0): 1, (0, 1, 0): 0}
    assert through_json(schedule.to_json())["workers"]["1.0"] == ["F0@0", "B0@0"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("1.0:", "1.1:", "line 4 starts with '1.0:'"),
        ("0.1:", "1:", "line 3 starts with '0.1:'"),
        ("0.1:", "0.0:", "line 3 starts with '0.1:'"),
        (
            "1.0: F0@0 B0@0\n1.1: F0@1 B0@1\n",
            "1.0: F0@0\n",
            "it has to divide the number of workers",
        ),
        ("F0@1", "F0", "an op of several replicas ends with its home, @0 to @1"),
        ("F0@1", "F0@2", "an op of several replicas ends with its home, @0 to @1"),
        ('"chunks": 1', '"chunks": 2', "it has to be 1 where there are several replicas"),
        ('"replicas": 2', '"replicas": 3', "it has to divide the number of workers, 4"),
        ('"replicas": 2', '"replicas": 0', "it has to be a whole number of at least 1"),
        ('"replicas": 2', '"replicas": true', "it has to be a whole number of at least 1"),
        ('"replicas": 2', '"replicas": "2"', "it has to be a whole number of at least 1"),
        ('"replicas": 2', '"replicas": null', "it has to be a whole number of at least 1"),
        ('"replicas": 2', '"replica": 2', "JSON object of microbatches"),
        ("B0@1", "SB0@1", "a schedule holds F, B, I, W and R"),
    ],
)
def test_what_is_no_schedule_is_refused(old, new, words):
    assert old in TWO
    assert words in str(refused(Schedule.parse, TWO.replace(old, new)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"replicas": 3}, "it has to divide the number of workers, 4"),
        ({"replicas": 0}, "a whole number of at least 1"),
        ({"replicas": 2.0}, "a whole number of at least 1"),
        ({"replicas": None}, "a whole number of at least 1"),
        ({"workers": {"0.0": [], "1.0": []}}, "op"),
        ({"workers": {"1.0": ["F0@0"], "0.0": ["F0@1"]}}, "in order, are 0.0, 1.0"),
        ({"workers": {"a": ["F0@0"], "b": ["F0@1"]}}, "in order, are 0.0, 1.0"),
        ({"workers": {}}, "at least 1 stage"),
        ({"workers": [["F0@0"], ["F0@1"]]}, "a list per stage of ops"),
        ({"workers": {"0.0": "F0@0", "1.0": ["F0@1"]}}, "a list per stage of ops"),
    ],
)
def test_what_is_no_schedule_in_json_is_refused(change, words):
    data = {**through_json(Schedule.parse(TWO).to_json()), **change}
    if change == {"workers": {"0.0": [], "1.0": []}}:
        assert Schedule.from_json(data).order == ((), ())
        return
    assert words in str(refused(Schedule.from_json, data))


@given(st.integers(2, 4), st.integers(1, 4))
def test_a_timeline_of_several_replicas_reads_back(replicas, stages):
    spans = (Span(replicas * stages - 1, Op(Kind.F, 0, 0, 1), 0.5, 1.5),)
    timeline = Timeline(spans, (), "predicted", replicas, stages)
    assert timeline_of(through_json(timeline.to_json())) == timeline
    assert timeline.workers == replicas * stages


# --- conditions ----------------------------------------------------------------------------------

PIPELINE = Conditions(4, (1.0,) * 3, (1.0,) * 3, (1.0,) * 3)
GOOD = {"pipeline": PIPELINE, "replicas": 2}


@given(replica_conditions())
def test_conditions_read_back(c):
    again = ReplicaConditions.from_json(through_json(c.to_json()))
    assert again == c
    assert json.dumps(again.to_json()) == json.dumps(c.to_json())


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("replicas", {"replicas": 1}),
        ("replicas", {"replicas": 0}),
        ("chunks", {"pipeline": replace(PIPELINE, chunks=2)}),
        ("core_share", {"core_share": {6: 0.5}}),
        ("core_share 0.1", {"core_share": {1: -0.1}}),
        ("core_share 1.1", {"core_share": {4: 1.1}}),
        ("core_share 1.1", {"core_share": {4: nan}}),
        ("failed", {"failed": frozenset({6})}),
        ("failed", {"failed": frozenset({-1})}),
        ("failed", {"failed": frozenset({1, 4})}),
        ("slow", {"slow": {6: 2.0}}),
        ("slow 0.1", {"slow": {1: 0.0}}),
        ("slow 0.1", {"slow": {1: -2.0}}),
        ("slow 0.1", {"slow": {1: inf}}),
        ("slow 1.1", {"slow": {4: nan}}),
        ("ports", {"ports": {-1: 1.0}}),
        ("port 1.2", {"ports": {5: 0.0}}),
        ("port 1.2", {"ports": {5: nan}}),
        ("path", {"paths": {(0, 6): LinkState(1.0)}}),
        ("path", {"paths": {(0, 3): LinkState(1.0)}}),
        ("path", {"paths": {(0, 2): LinkState(1.0)}}),
        ("path", {"paths": {(0, 0): LinkState(1.0)}}),
        ("path 0.0-1.1", {"paths": {(0, 4): LinkState(-1.0)}}),
        ("path 0.0-1.1", {"paths": {(0, 4): LinkState(nan)}}),
        ("path 0.0-1.1", {"paths": {(0, 4): LinkState(inf)}}),
        ("path 0.0-1.1", {"paths": {(0, 4): LinkState(0.0, 0.0)}}),
        ("path 0.0-1.1", {"paths": {(0, 4): LinkState(0.0, nan)}}),
        ("path 0.0-1.1", {"paths": {(0, 4): LinkState(0.0, 1.0, 0.5)}}),
        ("activation_budget", {"activation_budget": (4.0,) * 3}),
        ("activation_budget", {"activation_budget": (0.5,) * 6}),
        ("activation_budget", {"activation_budget": (nan,) * 6}),
    ],
)
def test_conditions_refuse(field, change):
    ReplicaConditions(**GOOD)
    assert refused(lambda: ReplicaConditions(**{**GOOD, **change})).field == field


@pytest.mark.parametrize(
    "change",
    [
        {"failed": ["0"]},
        {"failed": ["0.3"]},
        {"failed": ["2.0"]},
        {"failed": ["-1.0"]},
        {"failed": ["0.x"]},
        {"failed": 3},
        {"slow": {"0.0": "2x"}},
        {"slow": None},
        {"paths": {"0.0": [0.0, None]}},
        {"paths": {"0.0>1.1": [0.0]}},
        {"paths": {"0.0>1.1>0.1": [0.0, None]}},
        {"ports": {"0": 1.0}},
        {"replicas": "2"},
        {"pipeline": None},
        {"activation_budget": ["much"] * 6},
    ],
)
def test_conditions_in_json_refuse(change):
    refused(
        ReplicaConditions.from_json, {**through_json(ReplicaConditions(**GOOD).to_json()), **change}
    )


def test_what_is_not_known_of_a_worker_is_that_of_the_pipeline():
    pipeline = replace(
        PIPELINE,
        links={(0, 1): LinkState(0.5, 2.0)},
        message_bytes=3.0,
        activation_budget=(3, 2, 1),
    )
    c = ReplicaConditions(
        pipeline, 2, frozenset({2}), {4: 3.0}, {(0, 4): LinkState(7.0, 1.0)}, {5: 6.0}
    )
    assert [c.seconds(Kind.F, worker) for worker in range(6)] == [1, 1, 1, 1, 3, 1]
    assert c.seconds(Kind.B, 4) == 6
    assert (c.link(0, 4), c.wire(0, 4)) == (LinkState(7.0, 1.0), 3.0)
    for way in ((0, 1), (3, 4), (3, 1)):
        assert (c.link(*way), c.wire(*way)) == (LinkState(0.5, 2.0), 1.5)
    assert (c.link(4, 0), c.wire(4, 0)) == (LinkState(), 0.0)
    assert [c.port(worker) for worker in range(6)] == [0, 0, 0, 0, 0, 0.5]
    assert c.activation_budget == (3, 2, 1) * 2
    assert [c.alive(stage) for stage in range(3)] == [[0, 3], [1, 4], [5]]
