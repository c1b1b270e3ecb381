"""A change that was refused: what it was for is planned for again, against the plan in force."""

from __future__ import annotations

import pytest
from adapt.hand_fed import MS, Truth
from adapt.hand_fed import Job as Pipeline
from adapt.replica_job import Job as Replicas
from seeding import new_seed

from megatron_adaptra.measure.replica_estimate import Changed

SLOW = dict.fromkeys([(1, 2), (2, 1)], 60 * MS)
HALF_SPEED = {4: 2.0}


def refused(job: Pipeline | Replicas, truth: dict[str, object]) -> None:
    """The first change for a `truth`, refused when what it is for has changed again."""
    job.train(20)
    job.train(1, **truth)
    while not job.changes:
        job.train(1)
    ((iteration, change),) = job.changes.items()
    again = Changed(list(change.links), list(change.workers))
    for _ in range(2):  # a worker counts when it is confirmed twice
        job.remedy.plan(iteration, again, job.start, possible=False)
    job.refused = 1
    job.train(20)
    assert job.refused == 0
    _, other = list(job.changes.values())[:2]
    assert other.links == change.links, job.reasons
    assert other.workers == change.workers, job.reasons
    assert not job.ran[-1].same_as(job.start)


def test_links_of_a_pipeline() -> None:
    refused(Pipeline(Truth(1 * MS)), {"slow": SLOW})


@pytest.mark.parametrize("truth", [{"paths": SLOW}, {"slow": HALF_SPEED}])
def test_paths_and_workers_of_replicas(truth: dict[str, object]) -> None:
    refused(Replicas(seed=new_seed(), plus=2.0), truth)
