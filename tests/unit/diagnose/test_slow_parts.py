"""Slow loaders, garbage collections, slow stages and workers slow from the start are found."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from adapt import hand_fed, replica_job
from diagnose.diagnosed import Diagnosed

from megatron_adaptra.measure.report import StageReport

MS = 1e-3
BEGIN, SLOW, AFTER = 14, 16, 24  # iterations
END = BEGIN + SLOW
SEEDS = range(3)
TOOK = 1.0  # seconds of an iteration


def found(change: Callable[[int, StageReport], StageReport], each: int = 1) -> Diagnosed:
    job = hand_fed.Job(hand_fed.Truth(wire=1 * MS))
    seen = Diagnosed(job, hand_fed.STAGES, each=each)
    seen.change = change
    job.train(END + AFTER)
    return seen


def loading(rng: random.Random, worker: int, first: int, share: float) -> Diagnosed:
    """Both ends of the pipeline read; the `worker` waits for that `share` of its iterations."""

    def change(iteration: int, report: StageReport) -> StageReport:
        if report.worker not in (0, hand_fed.STAGES - 1):
            return report
        slow = report.worker == worker and first < iteration <= END  # reported an iteration later
        usual = 4 * MS * rng.lognormvariate(0, 0.3) + (rng.random() < 0.05) * 300 * MS
        waited = share * TOOK * rng.lognormvariate(0, 0.1) if slow else usual
        return replace(report, seconds=TOOK, loading=waited)

    return found(change)


@pytest.mark.parametrize("first", [0, BEGIN], ids=["from the start", "later"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_loader_is_opened_once_and_closed(seed: int, first: int) -> None:
    rng = random.Random(seed)
    worker, share = rng.choice([0, hand_fed.STAGES - 1]), rng.uniform(0.25, 0.8)
    seen = loading(rng, worker, first, share)
    opened, closed = seen.brief
    assert opened[:3] == ("opened", "data loader", [10 + worker])
    assert abs(opened[3] - first) <= 1
    assert closed == ("closed", "data loader", [10 + worker], opened[3], END)
    assert seen.events[0]["takes"] == pytest.approx(1e3 * share * TOOK, rel=0.3)
    assert seen.events[0]["found"] <= first + 5
    assert f"its iterations wait {seen.events[0]['takes']:.3g} ms for batches" in seen.lines[0]


def test_a_loader_that_takes_a_little_longer_is_no_finding() -> None:
    for seed in SEEDS:
        assert loading(random.Random(seed), 0, BEGIN, 0.08).events == []


def collecting(due: Callable[[int, int], bool], seconds: float) -> Diagnosed:
    """Workers collect for so many `seconds` in iterations in which they are `due`."""
    rng = random.Random(7)

    def change(iteration: int, report: StageReport) -> StageReport:
        long = BEGIN < iteration <= END and due(iteration - 1, report.worker)
        took = (seconds if long else 1 * MS) * rng.uniform(0.7, 1.4)
        return replace(report, seconds=TOOK, collecting=took)

    return found(change)


@pytest.mark.parametrize(
    ("due", "ranks"),
    [
        (lambda i, w: i % hand_fed.STAGES == w, [10, 11, 12, 13]),
        (lambda i, w: w == 2, [12]),
        (lambda i, w: (i % 3 == 0 and w == 1) or (i % 3 == 1 and w == 3), [11, 13]),
    ],
    ids=["by turns", "one rank", "two, now and then"],
)
def test_garbage_that_ranks_collect_one_by_one(
    due: Callable[[int, int], bool], ranks: list[int]
) -> None:
    seen = collecting(due, 250 * MS)
    opened, closed = seen.brief
    assert opened[:2] == ("opened", "garbage collection")
    assert closed[:3] == ("closed", "garbage collection", ranks)
    assert BEGIN <= opened[3] <= BEGIN + 2
    assert END - 3 <= (closed[4] or 0) <= END
    assert "--manual-gc" in seen.lines[0]


@pytest.mark.parametrize(
    ("due", "seconds"),
    [
        (lambda i, w: i % 3 == 0, 250 * MS),  # as with --manual-gc
        (lambda i, w: True, 250 * MS),
        (lambda i, w: i % hand_fed.STAGES == w, 30 * MS),  # too short to matter
        (lambda i, w: i == BEGIN + 4 and w == 2, 700 * MS),  # once
    ],
)
def test_garbage_that_holds_nobody_up(due: Callable[[int, int], bool], seconds: float) -> None:
    assert collecting(due, seconds).events == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("alike", [True, False])
def test_a_worker_slow_from_the_start_is_found_by_stages_with_its_layers(
    alike: bool, seed: int
) -> None:
    rng = random.Random(seed)
    worker, factor = rng.randrange(hand_fed.STAGES), rng.uniform(1.8, 4.0)

    def change(iteration: int, report: StageReport) -> StageReport:
        times = rng.lognormvariate(0, 0.05)
        if report.worker == worker and iteration < END:
            times *= factor
        layers = "4x100" if alike or report.worker != worker else "8x200"
        wall = {kind: times * seconds for kind, seconds in report.wall.items()}
        return replace(report, wall=wall, layers=layers)

    seen = found(change)
    if not alike or worker in (0, hand_fed.STAGES - 1):  # these may be long by design
        assert seen.events == []
        return
    opened, closed = seen.brief
    assert opened[:3] == ("opened", "slow worker", [10 + worker])
    assert opened[3] <= 1
    assert closed == ("closed", "slow worker", [10 + worker], opened[3], END)
    assert seen.events[0]["takes"] == pytest.approx(factor, rel=0.15)


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_ops_that_take_turns_on_a_core_make_no_slow_worker(share: float) -> None:
    """Nor while other workers of the host wait no more than before."""

    def change(iteration: int, report: StageReport) -> StageReport:
        late = report.worker == 1 and BEGIN <= iteration < END
        cpu = {kind: (1.7 if late else 1.0) * seconds for kind, seconds in report.wall.items()}
        queued = {kind: late * share * seconds for kind, seconds in cpu.items()}
        wall = {kind: seconds + queued[kind] for kind, seconds in cpu.items()}
        idle = dict.fromkeys(cpu, 0.0)
        return replace(report, wall=wall, cpu=cpu, queued=queued, idle=idle, alone={})

    named = [event["what"] for event in found(change, each=4).events if event["state"] == "opened"]
    assert named == ([] if share else ["slow worker"])


@pytest.mark.parametrize("what", ["slow stage", "slow replica"])
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_all_workers_of_a_stage_or_a_replica_are_one_finding(seed: int, what: str) -> None:
    job = replica_job.Job(replicas=3, seed=seed)
    seen = Diagnosed(job, 9, replicas=3)
    job.train(BEGIN)
    one = seed % 3
    slow = range(one, 9, 3) if what == "slow stage" else range(3 * one, 3 * one + 3)
    job.train(SLOW, slow=dict.fromkeys(slow, 3.0))
    job.train(AFTER, slow={})
    ranks = [10 + worker for worker in slow]
    assert [row[:3] for row in seen.brief] == [
        ("opened", what, ranks), ("closed", what, ranks),
    ], seen.lines  # fmt: skip
    assert (seen.events[0]["since"], seen.events[1]["until"]) == (BEGIN, END)
