"""Slow links and workers are found, named and closed, whatever any remedy makes of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from adapt import hand_fed, replica_job
from diagnose.diagnosed import Diagnosed

from megatron_adaptra.diagnose.beside import BesideOthers
from megatron_adaptra.diagnose.past import OwnPast

MS = 1e-3
BEGIN, SLOW, AFTER = 14, 16, 16  # iterations
SOON = 4  # iterations in which a change is found
SEEDS = range(6)


def pipeline(fixed: bool = False) -> tuple[hand_fed.Job, Diagnosed]:
    job = hand_fed.Job(hand_fed.Truth(wire=1 * MS))
    job.remedy.rule = replace(job.rule, fixed=fixed)
    return job, Diagnosed(job, hand_fed.STAGES)


@pytest.mark.parametrize("fixed", [False, True], ids=["plans change", "no plan is made"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_link_is_opened_once_and_closed(seed: int, fixed: bool) -> None:
    rng = random.Random(seed)
    a = rng.randrange(hand_fed.STAGES - 1)
    seconds = rng.uniform(15 * MS, 90 * MS)
    ways = [[(a, a + 1), (a + 1, a)], [(a, a + 1)], [(a + 1, a)]][seed % 3]
    job, seen = pipeline(fixed)
    job.train(BEGIN)
    assert seen.events == []
    job.train(SLOW, slow=dict.fromkeys(ways, seconds))
    job.train(AFTER, slow={})
    assert [event["state"] for event in seen.events] == ["opened", "closed"], seen.lines
    opened, closed = seen.events
    assert {place["rank"] for place in opened["where"]} == {10 + a, 11 + a}
    assert opened["what"] == "slow link"
    assert (opened["since"], closed["until"]) == (BEGIN, BEGIN + SLOW)
    assert opened["found"] - BEGIN < SOON
    assert opened["takes"] == pytest.approx(1e3 * seconds, rel=0.2)
    if fixed:
        assert opened["iteration_ms"] > opened["before_ms"]
        assert closed["lost_ms"] > 0


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_all_replicas_planned_together(seed: int) -> None:
    rng = random.Random(seed)
    job = replica_job.Job(replicas=3, seed=seed)
    seen = Diagnosed(job, 9, replicas=3)
    job.train(BEGIN)
    assert seen.events == []
    worker, factor = rng.randrange(9), rng.uniform(1.8, 6.0)
    a = rng.choice([w for w in range(9) if w % 3 < 2 and worker not in (w, w + 1)])
    paths = {(a, a + 1): 60 * MS, (a + 1, a): 60 * MS}
    job.train(SLOW, slow={worker: factor}, paths=paths)
    job.train(AFTER + 60, slow={}, paths={})  # a worker without microbatches has to be tried
    opened = {event["what"]: event for event in seen.events if event["state"] == "opened"}
    assert opened.keys() == {"slow worker", "slow link"}, seen.lines
    slow, link = opened["slow worker"], opened["slow link"]
    assert [place["rank"] for place in slow["where"]] == [10 + worker]
    assert slow["where"][0]["worker"] == f"{worker // 3}.{worker % 3}"
    assert {place["rank"] for place in link["where"]} == {10 + a, 11 + a}
    assert all(BEGIN <= event["found"] < BEGIN + SOON + 1 for event in opened.values())
    assert sorted(event["what"] for event in seen.events if event["state"] == "closed") == [
        "slow link", "slow worker",
    ]  # fmt: skip


def test_a_healthy_training_has_no_finding() -> None:
    for seed in SEEDS[:3]:
        job = replica_job.Job(replicas=2, seed=seed)
        seen = Diagnosed(job, 6, replicas=2)
        job.train(100)
        assert seen.events == [], seen.lines


@pytest.mark.parametrize("seed", SEEDS)
def test_without_peers_a_worker_is_compared_with_its_past(seed: int) -> None:
    rng = random.Random(seed)
    stages = rng.choice([1, 2, 4])
    odd, factor = rng.randrange(stages), rng.uniform(1.7, 6.0)
    own = [rng.uniform(0.5, 2.0) for _ in range(stages)]  # stages need not have the same work
    past, iterations = OwnPast(stages), itertools.count()

    def train(count: int, slow: dict[int, float], common: float = 1.0) -> list[dict[int, float]]:
        found = []
        for iteration in itertools.islice(iterations, count):
            each = {w: slow.get(w, 1.0) * rng.lognormvariate(0, 0.02) for w in range(stages)}
            took = {w: 0.03 * common * own[w] * times for w, times in each.items()}
            past.update(iteration, took, lambda worker: 0.0)
            found.append({w: sight.now for w, sight in past.slow.items()})
        return found

    assert not any(train(30, {}))
    found = train(20, {odd: factor})
    assert [row.keys() for row in found[SOON:]] == [{odd}] * (20 - SOON)
    assert found[-1][odd] == pytest.approx(factor, rel=0.15)
    assert not any(train(20, {})[SOON:])
    if stages > 1:  # what all share is no worker's
        assert not any(train(20, {}, common=2.0))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_beside_another_is_found_each_time(seed: int) -> None:
    """However often both have moved: what counts as normal wanders then."""
    rng, iterations = random.Random(seed), itertools.count()
    beside = BesideOthers(1, 2, leaders=False)

    def train(count: int, slow: dict[int, float], common: float = 1.0) -> set[int]:
        for iteration in itertools.islice(iterations, count):
            each = {w: common * slow.get(w, 1.0) * rng.lognormvariate(0, 0.05) for w in (0, 1)}
            walls = {w: {"F": 0.01 * times} for w, times in each.items()}
            beside.update(iteration, walls, lambda worker: 0.0)
        return set(beside.slow)

    for _ in range(20):
        assert not train(26, {}, rng.choice([1.0, 1.4]))
        worker = rng.randrange(2)
        assert train(14, {worker: rng.uniform(2.0, 4.0)}) == {worker}
