"""The clock over several replicas: against a second simulator, and worked out by hand."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir.strategies import random_replica_conditions, random_replicas, seeds
from sim.reference import reference_seconds

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.check import SENDS, check
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import COMPUTE
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule, parse_line, warmup_line
from megatron_adaptra.model.replica_bounds import replica_bound
from megatron_adaptra.plan.routes.reroute import alone, evaluate_replicas, stretched
from megatron_adaptra.sim.clock import simulate

NEAR = 1e-9
both_sends = st.sampled_from(SENDS)


def even(stages: int, count: int, replicas: int = 2, **more) -> ReplicaConditions:
    """F takes 1, I and W, too; a message has 1 byte."""
    ones = (1.0,) * stages
    return ReplicaConditions(
        Conditions(count, ones, ones, ones, message_bytes=1.0), replicas, **more
    )


def own_pipelines(stages: int, count: int, replicas: int) -> Schedule:
    """1F1B in each replica, every microbatch at home."""
    order = [
        tuple(op._replace(home=home) for op in warmup_line(stages - stage, count))
        for home in range(replicas)
        for stage in range(stages)
    ]
    return Schedule(tuple(order), count, replicas=replicas)


def two(*rows: str, count: int = 1) -> Schedule:
    return Schedule(tuple(parse_line(row.split()) for row in rows), count, replicas=2)


SWAPPED = two("F0@0 B0@0", "F0@1 B0@1", "F0@1 B0@1", "F0@0 B0@0")  # at the only boundary


def starts(timeline) -> dict[str, float]:
    return {f"{s.stage}:{s.op}": s.start for s in timeline.spans}


def arrivals(timeline, source: int | None = None) -> dict[str, float]:
    """Of all messages, or of those that one worker has sent."""
    return {str(m.op): m.arrived for m in timeline.messages if source in (None, m.source)}


# --- properties ----------------------------------------------------------------------------------


@settings(max_examples=200)
@given(seeds, both_sends)
def test_agrees_with_the_reference(seed, sends):
    rng = random.Random(seed)
    schedule = random_replicas(rng)
    c = random_replica_conditions(rng, schedule)
    program = lower(schedule, rng.choice([None, None, 9, *([0, 1] if sends == "eager" else [])]))
    timeline = simulate(program, c, sends)
    assert timeline.makespan == pytest.approx(reference_seconds(program, c, sends), rel=1e-12)
    assert (timeline.replicas, timeline.stages) == (schedule.replicas, schedule.stages)
    assert timeline.peak_in_flight() == schedule.peak_in_flight()


@given(seeds, both_sends)
def test_where_each_worker_has_a_core_cores_and_their_shares_do_not_matter(seed, sends):
    rng = random.Random(seed)
    schedule = random_replicas(rng)
    c, program = random_replica_conditions(rng, schedule), lower(schedule)
    shares = {w: rng.random() for w in range(c.workers) if rng.random() < 0.5}
    each = tuple(rng.random() for _ in range(c.stages))
    cores = rng.choice([None, float(c.stages), c.stages + 2 * rng.random()])
    pipeline = replace(c.pipeline, cores=cores, core_share=each)
    enough = replace(c, pipeline=pipeline, core_share=shares)
    assert simulate(program, enough, sends) == simulate(program, c, sends)
    assert replica_bound(enough) == replica_bound(c)


@given(seeds, both_sends)
def test_all_replicas_share_what_cores_there_are(seed, sends):
    """No core does more than its seconds, and no op takes less than on one of its own."""
    rng = random.Random(seed)
    schedule = random_replicas(rng)
    c = random_replica_conditions(rng, schedule, cores=rng.uniform(0.2, 1) * schedule.stages)
    c = replace(c, core_share={w: rng.random() for w in range(c.workers) if rng.random() < 0.5})
    timeline = simulate(lower(schedule), c, sends)
    assert c.cores == c.pipeline.cores * c.replicas
    for span in timeline.spans:
        least = c.seconds(span.op.kind, span.stage)
        assert span.end - span.start >= least * (1 - NEAR)
    computed = sum(c.on_core(s.stage) * c.seconds(s.op.kind, s.stage) for s in timeline.spans)
    assert timeline.makespan * c.cores >= computed * (1 - NEAR)


@given(seeds, st.sampled_from([1.0, 1.3, 2.0]))
def test_without_sharing_ops_take_as_long_as_was_asked(seed, stretch):
    rng = random.Random(seed)
    schedule = random_replicas(rng)
    c = random_replica_conditions(rng, schedule, cores=0.5 * schedule.stages)
    c = replace(c, core_share={w: rng.random() for w in range(c.workers) if rng.random() < 0.5})
    own = alone(c, stretch)
    assert own.cores is None
    for worker in range(c.workers):
        for kind in COMPUTE:
            seconds, computed = c.seconds(kind, worker), c.on_core(worker)
            takes = seconds * (1 - computed + computed * stretch)
            assert own.seconds(kind, worker) == pytest.approx(takes, rel=NEAR)
    plan = evaluate_replicas(schedule, c)
    assert 1 <= stretched(plan) <= 2 * (1 + NEAR)  # of all workers half can run


def test_two_replicas_on_one_core_take_the_sum():
    """The cores of a pipeline are its share: what one does not use, the other one does."""
    c = even(1, 3)
    c = replace(c, pipeline=replace(c.pipeline, cores=0.5))
    both = two("F0@0 B0@0 F1@0 B1@0 F2@0 B2@0", "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1", count=3)
    assert simulate(lower(both), c).makespan == 18
    one = two("F0@0 B0@0 F1@0 B1@0 F2@0 B2@0 F0@1 B0@1 F1@1 B1@1 F2@1 B2@1", "", count=3)
    assert simulate(lower(one), c).makespan == 18
    waits = replace(c, slow={1: 2.0}, core_share={1: 0.5})  # computes as long, and waits as long
    assert simulate(lower(both), waits).makespan < 24


@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 6), both_sends)
def test_replicas_that_keep_to_themselves_run_as_one(replicas, stages, count, sends):
    c = even(stages, count, replicas)
    one = simulate(
        lower(Schedule(tuple(warmup_line(stages - s, count) for s in range(stages)), count)),
        c.pipeline,
        sends,
    )
    all_of_them = simulate(lower(own_pipelines(stages, count, replicas)), c, sends)
    assert all_of_them.makespan == one.makespan == 3 * (count + stages - 1)
    assert [all_of_them.busy(worker) for worker in range(replicas * stages)] == (
        [one.busy(stage) for stage in range(stages)] * replicas
    )


# --- by hand: two replicas of two stages ----------------------------------------------------------


def test_a_port_out_serves_all_paths_in_turn():
    rows = "F0@0 F0@1 B0@0 B0@1", "F0@0 B0@0", "", "F0@1 B0@1"
    timeline = simulate(lower(two(*rows)), even(2, 1, ports={0: 0.25}))
    arrived = arrivals(timeline)
    # Out at 1 and 2, 4 of the port each. The gradients come in at 8 (made) + 4, and at 12 + 4.
    assert arrived == {"SF0@0": 5, "SF0@1": 9, "SB0@0": 12, "SB0@1": 16}
    assert timeline.makespan == 18


def test_the_example_in_the_docs():
    page = (Path(__file__).resolve().parents[3] / "docs" / "schedules.md").read_text()
    text = page.split("```text\n")[1].split("```")[0]
    schedule = Schedule.parse(text)
    assert schedule.text() == text
    program = lower(schedule)
    check(program, schedule.peak_in_flight())
    c = even(2, 3, failed=frozenset({2}))
    assert simulate(program, c).makespan == reference_seconds(program, c, "eager") == 18


# --- misuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [even(2, 1, 3), even(1, 1, 2), even(3, 1, 2).pipeline])
def test_costs_of_another_number_of_workers(c):
    with pytest.raises(BadInput, match="workers") as caught:
        simulate(lower(SWAPPED), c)
    assert "the program has 4" in str(caught.value)
