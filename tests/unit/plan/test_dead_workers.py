"""The best places for dead workers, and the file that keeps the plans for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_adaptra.base.errors import BadFile, BadInput
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.plan.failures import (
    best_failures,
    failure_plans,
    failure_vectors,
    job_key,
    stored_failure_plans,
    with_failures,
)
from megatron_adaptra.plan.routes.reroute import plan_replicas


def job(replicas: int, stages: int, count: int, beyond: int, **more: object) -> ReplicaConditions:
    """All ops take 1; each worker has room for `beyond` more than 1F1B has in flight."""
    one = (1.0,) * stages
    room = tuple(float(stages - s + beyond) for s in range(stages))
    pipeline = Conditions(count, one, one, one, activation_budget=room)
    return ReplicaConditions(pipeline, replicas, **more)  # type: ignore[arg-type]


def test_vectors_are_all_ways_to_miss_so_many():
    assert list(failure_vectors(3, 2, 2)) == [
        (2, 0, 0), (1, 1, 0), (1, 0, 1), (0, 2, 0), (0, 1, 1), (0, 0, 2),
    ]  # fmt: skip
    assert list(failure_vectors(3, 2, 1)) == [(1, 1, 0), (1, 0, 1), (0, 1, 1)]
    assert list(failure_vectors(2, 5, 2)) == []


def test_the_slowest_are_taken_for_dead():
    slow = job(3, 2, 4, 0, slow={2: 2.0})  # worker 1.0
    assert with_failures(slow, (1, 1)).failed == {2, 5}
    assert with_failures(slow, (2, 0)).failed == {2, 4}


# ReCycle's bubbles: the tables of slots with a common step; "beyond" is for all workers.
@pytest.mark.parametrize(
    ("shape", "failures", "best", "worst"),
    [
        ((3, 4, 6), 1, 28, 31),
        ((3, 4, 6), 3, 30, 58),
        ((4, 4, 8), 3, 36, 100),
        ((4, 4, 16), 1, 67, 70),
        ((4, 4, 16), 3, 69, 196),
    ],
)
def test_best_and_worst_places(shape, failures, best, worst):
    c = job(*shape, 2)
    assert best_failures(c, failures).seconds <= best
    at_the_end = (0, 0, 0, min(failures, shape[0] - 1))
    vector = (failures - at_the_end[3], *at_the_end[1:])
    assert best < plan_replicas(with_failures(c, vector)).predicted <= worst


def test_no_place_is_better_than_the_best():
    c = job(3, 3, 4, 1, slow={4: 1.5})
    best = best_failures(c, 2)
    every = [plan_replicas(with_failures(c, v)).predicted for v in failure_vectors(3, 2, 2)]
    assert best.seconds == pytest.approx(min(every), rel=1e-9)


@pytest.mark.parametrize("failures", [0, 5, 9])
def test_every_stage_keeps_a_worker(failures):
    with pytest.raises(BadInput, match="1 to 4: every stage keeps a worker"):
        best_failures(job(3, 2, 4, 0), failures)


def test_plans_are_kept_and_read_again(tmp_path: Path):
    c, lines = job(2, 3, 4, 1), []
    made = stored_failure_plans(tmp_path / "plans", c, 2, report=lines.append)
    assert made == failure_plans(c, 2)
    assert lines == ["planning for 1 of 2 failures", "planning for 2 of 2 failures"]
    assert stored_failure_plans(tmp_path / "plans", c, 2, report=lines.append) == made
    assert len(lines) == 2
    for plan in made:
        jobs = with_failures(c, plan.vector)
        budget = [0.0 if w in jobs.failed else b for w, b in enumerate(jobs.activation_budget)]
        check(lower(plan.schedule), budget)
    (file,) = (tmp_path / "plans").iterdir()
    assert file.name.startswith("failures-")


@pytest.mark.parametrize("damage", ["cut", "empty", "digit", "version", "no json", "binary"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str):
    c, lines = job(2, 2, 3, 1), []
    made = stored_failure_plans(tmp_path, c, 1)
    (file,) = tmp_path.iterdir()
    good = file.read_text()
    bad = {
        "cut": good[: len(good) // 2],
        "empty": "",
        "digit": good.replace('"F0@0"', '"F1@0"', 1),
        "version": json.dumps({**json.loads(good), "version": 99}),
        "no json": "[1, 2]",
    }
    file.write_bytes(b"\xff\xfe\x00") if damage == "binary" else file.write_text(bad[damage])
    assert stored_failure_plans(tmp_path, c, 1, report=lines.append) == made
    assert "is not usable, and is made anew" in lines[0]
    assert file.read_text() == good


def test_another_job_has_another_key(tmp_path: Path):
    c = job(2, 2, 3, 1)
    keys = {
        job_key(c, 1, "eager"),
        job_key(c, 2, "eager"),
        job_key(c, 1, "rendezvous"),
        job_key(replace(c, slow={1: 2.0}), 1, "eager"),
        job_key(job(2, 2, 4, 1), 1, "eager"),
    }
    assert len(keys) == 5
    assert job_key(job(2, 2, 3, 1), 1, "eager") in keys


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadFile, match="failure plans"):
        stored_failure_plans(tmp_path / "file", job(2, 2, 3, 1), 1)
