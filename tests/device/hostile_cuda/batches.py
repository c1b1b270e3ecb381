"""Many jobs in one process, which is not pytest's (see apart.py)."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from fakes.hostile_cuda.build import built
from fakes.hostile_cuda.driver import load
from hostile_cuda.jobs import Job

from megatron_adaptra.adapter.baseline import cpu

TIMEOUT = 60.0  # seconds for a message that never comes; nothing is measured with it

# What a thread that computes must not call while it does: they wait for the GPU. To pin memory
# takes milliseconds, and is for where no pinned memory is idle: a copy that stood on the GPU later
# could stand behind a collective that waits for its message.
BLOCKING = {"cuMemFreeHost", "cuMemHostUnregister"}


def prepare() -> None:
    """Before anything else here: stand-ins for torch's CUDA, and the driver."""
    cpu.install()
    load(built())
    gc.freeze()  # what has been imported is not looked through again


def run_jobs(jobs: Sequence[Job]) -> tuple[int, list[str]]:
    """How many went well before the first that did not, and what that one's faults are."""
    prepare()
    from hostile_cuda.ranks import run

    for i, job in enumerate(jobs):
        outcome = run(job, TIMEOUT)
        faults = outcome.faults
        for me in range(job.ranks):
            if blocking := BLOCKING & outcome.calls[f"rank {me}"].keys():
                faults.append(f"rank {me} computes, and calls {sorted(blocking)}")
        if faults:
            return i, [str(job), *faults]
    return len(jobs), []


def run_planted(plant: str, jobs: Sequence[Job]) -> list[list[str]]:
    """The faults of each job in which that one is planted."""
    prepare()
    from hostile_cuda.ranks import Plant, run

    return [run(job, TIMEOUT, Plant[plant]).faults for job in jobs]


def run_broken(jobs: Sequence[Job]) -> list[tuple[list[str], list[str]]]:
    """Of jobs whose driver fails: what each rank raised, and what is wrong besides."""
    prepare()
    from hostile_cuda.ranks import Plant, run

    outcomes = [run(job, TIMEOUT, Plant.BROKEN) for job in jobs]
    return [(o.errors, [*o.findings, *o.left]) for o in outcomes]
