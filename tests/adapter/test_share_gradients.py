"""Replicas with different numbers of microbatches: gradients are those of one process, in fp64.

One process runs the same microbatches without any parallelism. Counts are drawn by seed, and change
from iteration to iteration.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pairwise import Row, covering
from running import zygote
from seeding import new_seed

from megatron_adaptra.ir.sync import SyncPlan

pytestmark = pytest.mark.timeout(1200)

SCRIPT = Path(__file__).with_name("shares_script.py")
WITHIN = 1e-12
EACH = 3  # microbatches of a replica in stock
FIRST = 3  # the iteration from which on a fault is there
# Of faults, the plans that are in force: the one of iteration FIRST, and what follows.
FAULTS = {
    "raises": "full", "nonsense": "full", "nothing": "full", "other counts": "full",
    "other shape": "full", "unread": "full", "ends": "full", "deaf": "planned",
}  # fmt: skip
HEALTHY = {"fault": "", "ranks": [], "first": 0}
AXES = {
    "layout": ((1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (2, 4)),  # stages, replicas
    "optimizer": ("plain", "distributed"),
    "overlap": (False, True),
    "form": ("mean", "tokens", "per token"),  # of the loss
    "engine": ("native", "executor", "stock"),
}
QUICK = {**AXES, "layout": ((2, 2),)}


def possible(row: Row) -> bool:
    """One stage is Megatron's own under every engine."""
    return row["layout"][0] == 2 or row["engine"] == "native"


def drawn(draw: random.Random, replicas: int) -> list[int]:
    """Counts of replicas, at least 1 each, of which some differ."""
    while True:
        cuts = sorted(draw.sample(range(1, EACH * replicas), replicas - 1))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, EACH * replicas], strict=True)]
        if len(set(counts)) > 1:
            return counts


def cases(axes: dict[str, Any]) -> list[dict[str, Any]]:
    """The first iteration is stock's whatever is planned; one in the middle is full."""
    draw, found = random.Random(new_seed()), []
    for number, row in enumerate(covering(axes, possible)):
        (stages, replicas), full = row["layout"], [EACH] * row["layout"][1]
        plans = [full, drawn(draw, replicas), drawn(draw, replicas), full, drawn(draw, replicas)]
        name = f"{number}: {row} {plans[1:]}".replace("/", " ")
        case = {**row, "name": str(number), "words": name, "stages": stages, "plans": plans}
        found.append({**HEALTHY, **{k: value for k, value in case.items() if k != "layout"}})
    return found


def failing() -> list[dict[str, Any]]:
    """Every fault on one rank, with one stage and with two."""
    plans = [[EACH, EACH], [2, 4], [2, 4], [1, 5], [1, 5]]
    found = []
    for stages, fault in product((1, 2), FAULTS):
        row = {"optimizer": "plain", "overlap": True, "form": "mean", "engine": "executor"}
        name = f"{stages} stages, {fault}"
        ranks = [stages * 2 - 1]  # the last stage of replica 1
        case = {"name": name, "words": name, "stages": stages, "plans": plans, "ranks": ranks}
        found.append({**row, **case, "fault": fault, "first": FIRST})
    return found


Found = dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]


@pytest.fixture
def quick(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--quick"))


@pytest.fixture
def trained(quick: bool) -> Found:
    return of_all(quick)


@functools.cache
def of_all(quick: bool) -> Found:
    """Cases without faults."""
    return run(cases(QUICK if quick else AXES))[0]


def run(cases: list[dict[str, Any]]) -> tuple[Found, str]:
    """By name, each case and what its ranks have found; and all that was printed."""
    by_ranks: dict[int, list[dict[str, Any]]] = {}
    for case in cases:
        by_ranks.setdefault(case["stages"] * len(case["plans"][0]), []).append(case)
    found, text = Found(), ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ranks, some in by_ranks.items():
            some.sort(key=lambda case: case["stages"])
            (file := folder / f"{ranks}.json").write_text(json.dumps(some))
            for size in (1, ranks):
                words = [str(SCRIPT), str(file), name]
                done = zygote(False).run(folder / f"{ranks}", words, ranks=size, timeout=600)
                assert done.status == 0, done.text[-6000:]
            text += done.text
            rows = [json.loads(x[5:]) for x in done.texts[0].splitlines() if x[:5] == "CASE "]
            for case, row in zip(some, rows, strict=True):
                found[case["name"]] = case, row["ranks"]
    return found, text


def test_every_pair_of_settings_is_trained(trained: Found, quick: bool) -> None:
    cases = [case for case, _ in trained.values()]
    layouts = (QUICK if quick else AXES)["layout"]
    assert {(case["stages"], len(case["plans"][0])) for case in cases} == set(layouts)
    assert {case["engine"] for case in cases} == set(AXES["engine"])


def test_gradients_are_those_of_one_process(trained: Found) -> None:
    worst = 0.0
    for case, ranks in trained.values():
        for rank in ranks:
            for plan, found in zip(case["plans"], rank["iterations"], strict=True):
                assert found["plan"] == plan, case["words"]
                assert found["apart"] <= WITHIN, case["words"]
                worst = max(worst, found["apart"])
    print(f"gradients differ by {worst:.1e} at most, of {len(trained)} cases")


def test_the_loss_is_that_of_the_whole_batch(trained: Found) -> None:
    for case, ranks in trained.values():
        last = [rank for rank in ranks if rank["place"][1] == case["stages"] - 1]
        assert len(last) == len(case["plans"][0])
        for rank in last:
            assert all(found["loss"] <= WITHIN for found in rank["iterations"]), case["words"]


def test_each_sample_runs_once_where_its_plan_has_it(trained: Found) -> None:
    for case, ranks in trained.values():
        replicas = len(case["plans"][0])
        for iteration, counts in enumerate(case["plans"]):
            first = iteration * EACH * replicas
            plan = SyncPlan(EACH, tuple(counts))
            for rank in ranks:
                found, replica = rank["iterations"][iteration], rank["place"][0]
                wanted = [first + j * replicas + home for home, j in plan.share(replica)]
                assert found["ran"] == wanted, case["words"]
                assert found["next"] == first + EACH * replicas + replica, "its own position"


def test_the_source_learns_what_each_iteration_took(trained: Found) -> None:
    """In the next one: of the last nobody asks."""
    for case, ranks in trained.values():
        for rank in ranks:
            assert rank["ended"] == case["plans"][:-1], case["words"]


@pytest.mark.long
def test_where_a_rank_fails_all_go_on_together_as_stock() -> None:
    found, text = run(failing())
    faults = [case["fault"] for case, _ in found.values()]
    assert set(faults) == set(FAULTS)
    full = [EACH, EACH]
    for case, ranks in found.values():
        plans = case["plans"]
        if FAULTS[case["fault"]] == "full":
            plans = [*plans[:FIRST], *[full] * (len(plans) - FIRST)]
        for rank in ranks:
            assert [one["plan"] for one in rank["iterations"]] == plans, case["words"]
            assert all(one["apart"] <= WITHIN for one in rank["iterations"]), case["words"]
            replica = rank["place"][0]
            assert [one["next"] for one in rank["iterations"]] == [
                (iteration + 1) * EACH * 2 + replica for iteration in range(len(plans))
            ]
    # Once per case by rank 0; and of what cannot be read by the rank that has failed.
    ended = sum(FAULTS[fault] == "full" and fault != "ends" for fault in faults)
    line = "replicas run as many microbatches each: from iteration 4 on, as "
    assert text.count(line) == ended
    unread = "cannot read batches of other replicas, training goes on with its own"
    assert text.count(unread) == faults.count("unread") > 0
