"""The picture of an iteration of all replicas, in stock and with shares of microbatches."""

from benchmarks.common import both_ways
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.plan.shares.pipelines import share_pipelines
from megatron_adaptra.view.pipeline import pipeline_gantt, shares_gantt

PIPELINE = Conditions(6, (1.0,) * 2, (1.0,) * 2, (1.0,) * 2, both_ways([4.0]), step_seconds=2.0)
SLOW = ReplicaConditions(PIPELINE, 3, slow={4: 2.0, 5: 2.0})


def test_both_iterations_stand_on_one_axis():
    plan = share_pipelines(SLOW)
    before, after = plan.timelines()
    gantt = shares_gantt(before, after, SLOW)
    assert gantt.rows == 12
    assert [gantt.row_title(row) for row in (0, 5, 6, 11)] == [
        "full 0.0", "full 2.1, 2x slow", "share 0.0", "share 2.1, 2x slow",
    ]  # fmt: skip
    assert (gantt.makespan, gantt.length) == (plan.full, plan.predicted)
    upper = [bar for bar in gantt.bars if bar.row < 6]
    lower = [bar for bar in gantt.bars if bar.row >= 6]
    assert upper == list(pipeline_gantt(before).bars)
    assert max(bar.end for bar in lower) == plan.predicted
    assert {bar.owner for bar in upper} == {None}
    moved = sum(max(0, count - 6) for count in plan.sync.counts)
    guests = [bar for bar in lower if bar.owner is not None]
    assert len(guests) == moved * 2 * 2  # forwards and backwards of two stages
    assert {gantt.stripe(bar) for bar in guests} == {gantt.groups.colours[2]}
    assert gantt.groups.names(gantt.owners()) == "replica 2"


def test_messages_join_the_bars_of_their_own_half():
    plan = share_pipelines(SLOW)
    gantt = shares_gantt(*plan.timelines(), SLOW)
    assert len(gantt.arrows) == 2 * 2 * 18  # there and back, of each microbatch, twice
    for arrow in gantt.arrows:
        made, used = (gantt.bars[i] for i in arrow.joins)
        assert (made.row, used.row) == (arrow.source, arrow.target)
        assert made.end == arrow.sent
        assert used.start >= arrow.arrived
