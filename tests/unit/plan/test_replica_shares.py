"""Shares of microbatches where replicas are pipelines: simulated for each replica's own count."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir.strategies import replica_conditions

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.plan.pipeline.base import make_plan
from megatron_adaptra.plan.routes.reroute import evaluate_replicas
from megatron_adaptra.plan.shares.pipelines import pipeline_of, share_pipelines, speed_of

PIPELINE = Conditions(8, (1.0,) * 2, (1.0,) * 2, (1.0,) * 2, split=False, step_seconds=3.0)
SLOW = ReplicaConditions(PIPELINE, 4, slow={4: 2.0, 5: 2.0})


@st.composite
def jobs(draw):
    """Few microbatches, with memory for all, and no worker dead."""
    c = draw(replica_conditions())
    p, count = c.pipeline, draw(st.integers(1, 4))
    forward = (max(0.5, p.forward[0]), *p.forward[1:])  # something takes time
    pipeline = replace(p, microbatches=count, forward=forward, activation_budget=(), cores=None)
    return replace(c, pipeline=pipeline, failed=frozenset(), activation_budget=())


@settings(max_examples=30)
@given(jobs(), st.sampled_from(["eager", "rendezvous"]))
def test_stock_takes_what_all_workers_simulated_together_take(c, sends):
    plan = share_pipelines(c, sends)
    schedule = make_plan(c.pipeline, "1f1b", sends).schedule.replicated(c.replicas)
    assert plan.full == pytest.approx(evaluate_replicas(schedule, c, sends).predicted)


@pytest.mark.long
@settings(max_examples=25)
@given(jobs())
def test_no_counts_are_better(c):
    plan = share_pipelines(c)
    total = c.replicas * c.microbatches
    every = itertools.combinations(range(1, total), c.replicas - 1)
    options = [[b - a for a, b in itertools.pairwise((0, *cuts, total))] for cuts in every]
    best = min(share_pipelines(c, counts=counts).predicted for counts in options)
    assert plan.predicted == pytest.approx(best)
    assert plan.bound <= best * (1 + 1e-9)


@settings(max_examples=25)
@given(jobs(), st.sampled_from(["1f1b", "gpipe", "zb-h1", "adaptive"]))
def test_no_schedule_is_faster_than_the_speed_of_a_replica(c, policy):
    for replica in c.all_replicas:
        one = pipeline_of(c, replica, c.microbatches)
        least = speed_of(c, replica).seconds(c.microbatches)
        assert least <= make_plan(one, policy).predicted * (1 + 1e-9)


def test_two_stages_by_hand():
    """A microbatch takes 3 s on each stage, on the slow replica 6; filling and draining as long."""
    plan = share_pipelines(SLOW)
    assert plan.sync.counts == (10, 9, 4, 9)  # with 5 it would take 36 s
    assert plan.seconds == (33, 30, 30, 30)
    assert (plan.full, plan.predicted) == (6 * 9 + 3, 33 + 3)
    assert [speed_of(SLOW, replica) for replica in (0, 2)] == [(3, 3), (6, 6)]
    # 32 microbatches in T: three replicas run (T - 3) / 3 of them, one (T - 6) / 6.
    assert plan.bound == pytest.approx((32 + 4) / (3 / 3 + 1 / 6) + 3)


def test_where_one_stage_is_slow_it_sets_the_pace():
    plan = share_pipelines(replace(SLOW, slow={5: 2.0}))
    assert plan.before[2].predicted == 8 * 6 + 3
    assert plan.sync.counts == (9, 9, 5, 9)
    assert plan.seconds == (30, 30, 33, 30)


def test_a_timeline_shows_each_microbatch_once_and_all_replicas_end_together():
    plan = share_pipelines(SLOW)
    before, after = plan.timelines()
    assert (before.makespan, after.makespan) == (plan.full, plan.predicted)
    for timeline in (before, after):
        for stage in range(2):
            for kind in (Kind.F, Kind.B):
                ran = [
                    (s.op.home, s.op.microbatch)
                    for s in timeline.spans
                    if s.op.kind is kind and s.stage % 2 == stage
                ]
                assert sorted(ran) == [(h, j) for h in range(4) for j in range(8)]
        steps = {(s.start, s.end) for s in timeline.spans if s.op.kind is Kind.STEP}
        assert steps == {(timeline.makespan - 3, timeline.makespan)}
        sends = [m for m in timeline.messages if m.op.kind is Kind.SEND_F]
        assert sorted((m.op.home, m.op.microbatch) for m in sends) == sorted(
            (h, j) for h in range(4) for j in range(8)
        )
    guests = {
        (s.stage // 2, s.op.home, s.op.microbatch)
        for s in after.spans
        if s.op.home not in (None, s.stage // 2)
    }
    assert guests == {(0, 2, 4), (0, 2, 5), (1, 2, 6), (3, 2, 7)}
    assert {m.source // 2 for m in after.messages} == {0, 1, 2, 3}


def test_a_replica_without_memory_for_more_gets_no_more():
    """Of two microbatches two are in flight on the first of three stages; of three, three."""
    pipeline = Conditions(2, *[(1.0,) * 3] * 3)
    c = ReplicaConditions(pipeline, 2, slow=dict.fromkeys((3, 4, 5), 9.0))
    assert share_pipelines(c).sync.counts == (3, 1)
    tight = replace(c, activation_budget=(2.0,) * 6)
    assert share_pipelines(tight).sync.full
    with pytest.raises(BadInput, match=r"activation_budget 2.0: policy 1f1b needs at least 3 on"):
        share_pipelines(tight, counts=(3, 1))
    with pytest.raises(BadInput, match=r"activation_budget 1.0: policy 1f1b needs at least 2 on"):
        share_pipelines(replace(c, activation_budget=(2.0, 2.0, 2.0, 1.0, 1.0, 1.0)))


def test_a_pipeline_has_the_links_and_times_of_its_workers():
    pipeline = replace(
        PIPELINE, links={(0, 1): LinkState(0.5)}, message_bytes=8.0, backward=(1.5,) * 2
    )
    c = ReplicaConditions(
        pipeline, 2, slow={2: 3.0}, paths={(3, 2): LinkState(0.25, 4.0)}, ports={3: 2.0}
    )
    one = pipeline_of(c, 1, 5)
    assert (one.microbatches, one.forward, one.backward) == (5, (3, 1), (4.5, 1.5))
    assert one.link(0, 1) == LinkState(0.5)
    assert one.link(1, 0) == LinkState(0.25, 4.0)
    assert one.ports == {1: 2.0}
    assert one.step_seconds == 0
    assert not pipeline_of(c, 0, 8).ports


@pytest.mark.parametrize(
    ("change", "counts", "words"),
    [
        ({"failed": frozenset({3})}, None, "failed '1.1': a replica with a dead worker"),
        ({}, (9, 9, 9, 6), "they add up to 33"),
        ({}, (8, 8, 8), "one per replica, and there are 4"),
    ],
)
def test_what_no_shares_help_is_refused(change, counts, words):
    with pytest.raises(BadInput) as caught:
        share_pipelines(replace(SLOW, **change), counts=counts)
    assert words in str(caught.value)


def test_a_port_in_the_middle_passes_what_comes_from_both_sides_one_after_another():
    """The middle worker of a replica gets two messages per microbatch, which take 4 s each."""
    pipeline = Conditions(8, *3 * ((1.0,) * 3,), message_bytes=8.0, split=False)
    c = ReplicaConditions(pipeline, 2, ports={4: 2.0})
    full, part = share_pipelines(c, counts=(8, 8)), share_pipelines(c)
    assert full.seconds[1] > 8 * 2 * 4
    schedule = make_plan(pipeline, "1f1b").schedule.replicated(2)
    assert full.full == pytest.approx(evaluate_replicas(schedule, c).predicted)
    assert part.sync.counts[1] < 4  # the other one's stages take 3 s for a microbatch
    assert part.predicted < full.predicted
