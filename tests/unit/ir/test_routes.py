"""Who runs what, read off a schedule: names of workers, and moved microbatches."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir.strategies import random_replicas, random_schedule, seeds

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.deps import consumer, maker, makes, needs
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.routes import Routes, parse_worker, worker_name


@given(st.integers(1, 9), st.integers(0, 99))
def test_the_name_of_a_worker_reads_back(stages, worker):
    assert parse_worker(worker_name(worker, stages), stages) == worker


def test_names():
    assert Routes(3).name(2) == "stage 2"
    assert Routes(3, replicas=2).name(5) == "worker 1.2"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        ".",
        "1.",
        ".1",
        "1.3",
        "1.-1",
        "-1.1",
        "1.1.1",
        "1,1",
        " 1.1",
        "a.1",
        "1.1x",
        "²1.1",
    ],
)
def test_what_is_no_worker_is_refused(text):
    with pytest.raises(BadInput, match=r"stages are 0 to 2") as caught:
        parse_worker(text, 3)
    assert caught.value.field == "worker"


@given(seeds)
def test_the_routes_are_where_the_ops_stand(seed):
    schedule = random_replicas(random.Random(seed))
    routes, moved = schedule.routes, 0
    assert (routes.stages, routes.workers) == (schedule.stages, len(schedule.order))
    for worker, line in enumerate(schedule.order):
        replica, stage = divmod(worker, schedule.stages)
        for op in line:
            assert routes.worker(stage, op.microbatch, op.home) == worker
            moved += op.kind is Kind.F and op.home != replica
    assert len(routes.moved) == moved


@given(seeds, st.booleans())
def test_who_makes_and_who_uses_a_token_agree(seed, several):
    rng = random.Random(seed)
    schedule = random_replicas(rng) if several else random_schedule(rng, 3, 3, 2, 0.5, 0.3)
    routes, stood, remote = schedule.routes, {}, set()
    for worker, line in enumerate(schedule.order):
        for op in line:
            made = makes(op, worker, routes)
            if made is not None:
                assert maker(made, routes) == worker
                stood[made] = worker
    for worker, line in enumerate(schedule.order):
        for op in line:
            for token in needs(op, worker, routes):
                assert maker(token, routes) == stood[token]
                if stood[token] != worker:
                    assert consumer(token, routes) == worker
                    remote.add(token)
    assert remote == {token for token in stood if consumer(token, routes) is not None}
