"""Slow workers are named soon and rightly, whatever else makes ops take longer."""

import math
import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure.records import record
from measure.workers import jittery

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.measure.slow_workers import LASTING, TRY_AGAIN, SlowWorkers, worker_in_words

STAGES = 3
SEED = 20251125  # fixed: a rate of false alarms is never quite zero


def iteration(times, replicas=2, *, counts=None, missing=()):
    """Seconds of ops, by worker. `times`: by worker, how many times as long its ops take."""
    reports = {}
    for worker in range(STAGES * replicas):
        if worker not in missing:
            slow, count = times.get(worker, 1.0), (counts or {}).get(worker, 4)
            made = record(worker, 0, {}, forward=0.01 * slow, backward=0.02 * slow, count=count)
            reports[worker] = made.report().wall
    return reports


def run(workers, count, times, replicas=2, **more):
    """What is decided in so many iterations, from 1 on: iteration, words."""
    found = []
    for i in range(1, count + 1):
        if changed := workers.update(iteration(times, replicas, **more)):
            now = workers.factors()
            found.append((i, [worker_in_words(w, now[w], STAGES) for w in changed]))
            workers.accept()
    return found


@pytest.fixture(params=[2, 3, 4])
def replicas(request):
    return request.param


def healthy(replicas, count=20):
    workers = SlowWorkers(STAGES, replicas)
    assert run(workers, count, {}, replicas) == []
    return workers


def test_a_worker_that_gets_slow_is_named_and_heals(replicas):
    workers = healthy(replicas)
    words = "worker 1.2 takes 2.0 times as long as its peers"
    assert run(workers, 20, {5: 2.0}, replicas) == [(3, [words])]
    assert workers.slow() == {5: pytest.approx(2.0)}
    words = "worker 1.2 takes as long as its peers again"
    assert run(workers, 20, {}, replicas) == [(3, [words])]
    assert workers.slow() == {}


def test_healing_is_no_change_of_its_peers(replicas):
    workers = healthy(replicas)
    run(workers, 10, {5: 2.0}, replicas)
    assert workers.update(iteration({}, replicas)) == []
    assert workers.alarms() == ["1.2"]


@pytest.mark.parametrize("worker", [1, 4])
def test_of_two_that_differ_the_one_that_has_changed_is_slow(worker):
    """Also while the other one is slow already, and however that one has become so."""
    workers = healthy(2)
    assert run(workers, 10, {worker: 1.5})[0][0] == 3
    assert set(workers.slow()) == {worker}
    # The other one is as slow now: nobody is slower than anybody else.
    run(workers, 10, {1: 1.5, 4: 1.5})
    assert workers.slow() == {}
    run(workers, 10, {worker: 1.5, 5 - worker: 3.0})
    assert workers.slow() == {5 - worker: pytest.approx(2.0)}


def test_a_stage_that_gets_slow_is_no_slow_worker(replicas):
    workers = healthy(replicas)
    stage = {replica * STAGES + 1: 3.0 for replica in range(replicas)}
    assert run(workers, 30, stage, replicas) == []
    # The past of its workers is in today's seconds: one that gets slow now is found as before.
    assert [i for i, _ in run(workers, 20, stage | {1: 6.0}, replicas)] == [3]
    assert workers.slow() == {1: pytest.approx(2.0)}
    assert run(workers, 20, {1: 2.0}, replicas) == []
    assert run(workers, 20, {}, replicas)[-1][1] == ["worker 0.1 takes as long as its peers again"]


def test_stages_are_not_compared_with_each_other(replicas):
    workers = SlowWorkers(STAGES, replicas)
    last = {replica * STAGES + 2: 4.0 for replica in range(replicas)}
    assert run(workers, 30, last, replicas) == []


@pytest.mark.parametrize("worker", [0, 3])
def test_slow_from_the_first_iteration_on(replicas, worker):
    workers = SlowWorkers(STAGES, replicas)
    words = f"worker {worker // STAGES}.0 takes 1.5 times as long as its peers"
    assert run(workers, 20, {worker: 1.5}, replicas) == [(4, [words])]
    assert [i for i, _ in run(workers, 20, {}, replicas)] == [3]
    assert workers.slow() == {}


@pytest.mark.parametrize("first", [{0: 30.0}, {0: 30.0, 3: 9.0}, {3: 30.0, 1: 2.0}])
@pytest.mark.parametrize("slow", [{}, {0: 2.0}, {3: 2.0}])
def test_warm_up_iterations_are_not_taken_for_normal(first, slow):
    """They take longer, and not equally so."""
    workers = SlowWorkers(STAGES, 2)
    for share in (1.0, 0.2):
        times = {w: max(1.0, share * first.get(w, 1.0)) * slow.get(w, 1.0) for w in range(6)}
        assert workers.update(iteration(times)) == []
    run(workers, 10, slow)
    assert workers.slow() == {w: pytest.approx(times) for w, times in slow.items()}
    run(workers, 10, {})
    assert workers.slow() == {}


def test_how_many_microbatches_it_runs_does_not_matter(replicas):
    workers = healthy(replicas)
    assert run(workers, 20, {}, replicas, counts={5: 1, 2: 9}) == []
    assert [i for i, _ in run(workers, 20, {5: 2.0}, replicas, counts={5: 1, 2: 9})] == [3]


def kinds(slow, *, halves):
    """Of stage 0; `halves` in which a backward takes 15 % more, and forwards are run again."""
    whole, split = {"F": 1.0, "B": 2.0}, {"F": 1.0, "I": 1.3, "W": 1.0, "R": 0.9}
    rows = {w: split if w in halves else whole for w in (0, 1)}
    return {w: {k: 0.01 * slow.get(w, 1.0) * s for k, s in row.items()} for w, row in rows.items()}


def test_other_kinds_of_ops_make_nobody_slow():
    workers = SlowWorkers(1, 2)
    for halves in ((), (1,), (0, 1), (0,), ()):
        for _ in range(10):
            assert workers.update(kinds({}, halves=halves)) == []


def test_a_worker_that_runs_halves_for_the_first_time_while_it_is_slow():
    workers = SlowWorkers(1, 2)
    for _ in range(20):
        assert workers.update(kinds({}, halves=())) == []
    found = [workers.update(kinds({1: 2.0}, halves=(1,))) for _ in range(4)]
    assert found == [[], [], [1], [1]]
    assert workers.slow() == {1: pytest.approx(2.0)}


def test_a_worker_without_a_microbatch_keeps_its_factor_and_is_tried_again():
    workers = healthy(2)
    run(workers, 10, {5: 2.0})
    counts = {5: 0, 2: 8}
    assert run(workers, TRY_AGAIN - 1, {}, counts=counts) == []
    assert workers.to_try() == []
    assert run(workers, 1, {}, counts=counts) == []
    assert workers.to_try() == [5]
    assert workers.slow() == {5: pytest.approx(2.0)}
    # It is tried, and is still slow; the next time it has healed.
    assert run(workers, 4, {5: 2.0}) == []
    assert workers.to_try() == []
    assert run(workers, TRY_AGAIN, {}, counts=counts) == []
    assert workers.to_try() == [5]
    assert [i for i, _ in run(workers, 4, {})] == [3]
    assert workers.slow() == {}


def test_while_its_only_peer_is_idle_a_workers_own_past_decides():
    workers = healthy(2)
    run(workers, 10, {5: 4.0})
    assert [i for i, _ in run(workers, 10, {2: 1.5}, counts={5: 0})] == [3]
    assert workers.slow() == {5: pytest.approx(4.0 / 1.5)}  # of what the other one takes now


def test_missing_reports_are_no_change(replicas):
    workers = healthy(replicas)
    run(workers, 10, {5: 2.0}, replicas)
    rng = random.Random(SEED)
    for _ in range(200):
        missing = {w for w in range(STAGES * replicas) if rng.random() < 0.4}
        assert run(workers, 1, {5: 2.0}, replicas, missing=missing) == []
    assert workers.slow() == {5: pytest.approx(2.0)}
    assert workers.update({}) == []


def test_a_change_is_found_between_missing_reports(replicas):
    workers = healthy(replicas)
    for _ in range(2):
        assert run(workers, 1, {5: 2.0}, replicas) == []
        assert run(workers, 1, {5: 2.0}, replicas, missing={5}) == []
    assert [i for i, _ in run(workers, 1, {5: 2.0}, replicas)] == [1]


def test_one_slow_iteration_is_an_alarm_and_no_decision(replicas):
    workers = healthy(replicas)
    assert workers.update(iteration({5: 5.0}, replicas)) == []
    assert workers.alarms() == ["1.2"]
    assert run(workers, 20, {}, replicas) == []
    assert workers.alarms() == []


def test_slow_iterations_that_differ_are_no_decision(replicas):
    workers = healthy(replicas)
    for times in (1.75, 2.9, 3.3, 1.0, 1.0):
        assert workers.update(iteration({5: times}, replicas)) == []
    assert run(workers, 20, {}, replicas) == []


def test_enough_slow_iterations_in_a_row_are_a_decision_however_they_differ(replicas):
    workers, differ = healthy(replicas), (3.0, 1.6) * (LASTING // 2)
    for times in differ[:-1]:
        assert workers.update(iteration({5: times}, replicas)) == []
    assert workers.update(iteration({5: differ[-1]}, replicas)) == [5]
    assert workers.slow() == {5: pytest.approx(math.sqrt(3.0 * 1.6))}
    workers.accept()
    assert len(run(workers, 5, {}, replicas)) == 1
    assert workers.slow() == {}


def test_a_change_is_named_until_it_is_planned_for():
    workers = healthy(2)
    found = [workers.update(iteration({5: 2.0})) for _ in range(5)]
    assert found == [[], [], [5], [5], [5]]
    workers.accept()
    assert workers.update(iteration({5: 2.0})) == []


@pytest.mark.parametrize("times", [0.9, 1.15])
def test_what_is_too_little_to_plan_for(replicas, times):
    assert run(SlowWorkers(STAGES, replicas), 50, {4: times}, replicas) == []
    assert run(healthy(replicas), 50, {4: times}, replicas) == []


def test_a_worker_that_gets_slow_little_by_little_is_found(replicas):
    workers = healthy(replicas, 120)
    for i in range(200):
        run(workers, 1, {5: 1.005**i}, replicas)
    assert workers.slow() == {5: pytest.approx(1.005**199, rel=0.25)}


@pytest.mark.parametrize(("replicas", "sigma"), [(2, 0.1), (2, 0.25), (4, 0.1)])
def test_jittery_healthy_workers_are_hardly_ever_called_slow(replicas, sigma):
    """At most 0.1 of 1000 worker iterations; benchmarks/slow_workers.py counts more of them."""
    print(f"seed {SEED}")
    workers, found, count = SlowWorkers(STAGES, replicas), 0, 1000
    for made in islice(jittery(random.Random(SEED), STAGES, replicas, sigma), count):
        if changed := workers.update(made({})):
            found += len(changed)
            workers.accept()
    assert found <= 0.1 * count * STAGES * replicas / 1000


@pytest.mark.parametrize("begin", [0, 30])
@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_a_slow_worker_is_named_within_five_iterations_and_a_tenth(factor, begin):
    """Whether it gets slow or has been from the start. The benchmark has bursts, too."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for trial in range(20):
        replicas = 2 + trial % 3
        trace = jittery(rng, 1, replicas, 0.05, bursts=0.0)
        workers = SlowWorkers(1, replicas)
        for made in islice(trace, begin):
            assert not workers.update(made({}))
        for made in islice(trace, 5):
            if workers.update(made({1: factor})):
                workers.accept()
        assert workers.slow() == {1: pytest.approx(factor, rel=0.1)}, trial


def test_noisy_first_iterations_do_not_make_a_slow_worker_normal():
    workers = SlowWorkers(STAGES, 2)
    for times in (1.3, 1.0, 1.3, 1.0):
        assert workers.update(iteration({5: times})) == []
    run(workers, 30, {5: 1.3})
    assert workers.slow() == {5: pytest.approx(1.3)}
    run(workers, 5, {})
    assert workers.slow() == {}


@given(
    st.lists(
        st.dictionaries(
            st.integers(0, 3),
            st.dictionaries(st.sampled_from("FBIWR"), st.floats(0, 1e300)),
        ),
        max_size=20,
    ),
    st.integers(1, 5),
)
def test_whatever_reports_hold_factors_stay_within_what_was_seen(rows, every):
    workers = SlowWorkers(2, 2)
    for i, row in enumerate(rows):
        workers.update(row)
        if i % every == 0:
            workers.accept()
            assert workers.update({}) == []
        assert all(0 < factor < float("inf") for factor in workers.factors().values())
        for stage in range(2):
            assert min(workers.factors()[stage], workers.factors()[stage + 2]) <= 1.0


def test_bad_input():
    with pytest.raises(BadInput, match="replicas"):
        SlowWorkers(3, 0)
    with pytest.raises(BadInput, match="stages"):
        SlowWorkers(0, 2)
    with pytest.raises(BadInput, match="worker"):
        SlowWorkers(1, 2).update({2: {}})
