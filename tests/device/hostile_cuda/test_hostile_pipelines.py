"""Whole pipelines over the hostile driver: results as without a pipeline, no race, no deadlock.

Everything above the driver is the product's: engine, device layer, transport, mailbox, Megatron's
own schedule over our communicators or the executor's loop. Ops are kernels in which every input and
every order shows.
"""

from __future__ import annotations

from itertools import product

import pytest
from apart import apart
from fakes.hostile_cuda import build
from hostile_cuda.batches import run_broken, run_jobs, run_planted
from hostile_cuda.jobs import EXECUTOR, NATIVE, Job

from megatron_adaptra.transport.engine import bindings

_MISSING = build.missing() or bindings.missing()
pytestmark = [
    pytest.mark.cold,
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "-"),
]
QUEUES, CHUNKS, ORDERS = (1, 8, 32), (1, 2), (NATIVE, EXECUTOR)
SEEDS = {2: 24, 4: 12, 8: 6}  # by stages, of which each queue, chunk and order gets its share
ALL, BLOCK = 1000, 250


@pytest.mark.crowd
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stages", SEEDS)
def test_pipelines(stages: int, order: str) -> None:
    jobs = [
        Job(stages, CHUNKS[seed // 3 % 2], order, QUEUES[seed % 3], seed)
        for seed in range(SEEDS[stages])
    ]
    good, faults = apart(run_jobs, jobs)
    assert good == len(jobs), faults


@pytest.mark.large
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("block", range(ALL // BLOCK))
@pytest.mark.parametrize(
    ("stages", "chunks", "order", "queues"), list(product(SEEDS, CHUNKS, ORDERS, QUEUES))
)
def test_a_thousand_seeds(stages: int, chunks: int, order: str, queues: int, block: int) -> None:
    seeds = range(1000 + block * BLOCK, 1000 + (block + 1) * BLOCK)
    jobs = [Job(stages, chunks, order, queues, seed) for seed in seeds]
    good, faults = apart(run_jobs, jobs, seconds=7000)
    assert good == len(jobs), faults


@pytest.mark.parametrize(
    ("plant", "queues", "says"),
    [
        ("NO_WAITS", 8, ("race: ", "a copy of", "no event orders them")),
        ("ALL_OVER", 8, ("race: the next use of", "freed", "a copy of", "to the host")),
        ("LAUNCH_TIMES", 8, ("time: ", "ended", "after its mark says")),
        ("LATE_SENDS", 1, ("deadlock: ", "stands in hardware queue 0 behind", "-> collective of")),
    ],
)
def test_planted_faults(plant: str, queues: int, says: tuple[str, ...]) -> None:
    """Each in words of its own: a detector that finds nothing would pass all jobs."""
    jobs = [Job(2, 1, EXECUTOR, queues, seed) for seed in range(6)]
    found = apart(run_planted, plant, jobs)
    caught = [any(all(w in fault for w in says) for fault in faults) for faults in found]
    assert sum(caught) > len(jobs) // 2, found


def test_an_error_of_the_driver_reaches_every_rank() -> None:
    """The rank that it hits and those that wait for it raise it; no rank hangs, nothing is left."""
    jobs = [Job(4, 1, EXECUTOR, 8, seed) for seed in range(6)]
    for job, (errors, besides) in zip(jobs, apart(run_broken, jobs), strict=True):
        assert len(errors) == job.ranks, errors
        assert any("cuMemcpyDtoHAsync failed: CUDA_ERROR_LAUNCH_FAILED" in e for e in errors)
        assert not besides
