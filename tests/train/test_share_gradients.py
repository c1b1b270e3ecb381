"""Replicas with different numbers of microbatches: gradients are those of one process, in fp64.

One process runs the same microbatches without any parallelism. Counts are drawn by seed, and change
from iteration to iteration.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from pairwise import Row, covering
from running import zygote
from seeding import new_seed

from megatron_adaptra.ir.sync import SyncPlan

pytestmark = pytest.mark.timeout(1200)

SCRIPT = Path(__file__).parent / "ranks" / "shares_script.py"
WITHIN = 1e-12
EACH = 3  # microbatches of a replica in stock
FIRST = 3  # the iteration from which on a fault is there
# The plans that are in force with a fault that no function of ours has, which test_law.py plants:
# the one of iteration FIRST, and what follows.
FAULTS = ("other counts", "unread", "ends")
HEALTHY = {"fault": "", "ranks": [], "first": 0}
AXES = {
    "layout": ((1, 2), (1, 3), (2, 2), (2, 4)),  # stages, replicas
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
    """Every fault on one rank: of the last stage of replica 1."""
    plans = [[EACH, EACH], [2, 4], [2, 4], [1, 5], [1, 5]]
    row = {"optimizer": "plain", "overlap": True, "form": "mean", "engine": "executor"}
    case = {**row, "stages": 2, "plans": plans, "ranks": [3], "first": FIRST}
    return [{**case, "name": fault, "words": fault, "fault": fault} for fault in FAULTS]


Found = dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]


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


def test_gradients_and_losses_are_those_of_one_process(pytestconfig: pytest.Config) -> None:
    """Each sample runs once, where its plan has it, with every pair of settings.

    The source learns what an iteration took in the next one: of the last nobody asks.
    """
    found, _ = run(cases(QUICK if pytestconfig.getoption("--quick") else AXES))
    worst = 0.0
    for case, ranks in found.values():
        replicas, words = len(case["plans"][0]), case["words"]
        for rank in ranks:
            replica, stage = rank["place"]
            assert rank["ended"] == case["plans"][:-1], words
            for iteration, (counts, one) in enumerate(
                zip(case["plans"], rank["iterations"], strict=True)
            ):
                first, plan = iteration * EACH * replicas, SyncPlan(EACH, tuple(counts))
                assert one["plan"] == counts, words
                assert one["apart"] <= WITHIN, words
                assert stage < case["stages"] - 1 or one["loss"] <= WITHIN, words
                wanted = [first + j * replicas + home for home, j in plan.share(replica)]
                assert one["ran"] == wanted, words
                assert one["next"] == first + EACH * replicas + replica, "its own position"
                worst = max(worst, one["apart"])
    print(f"gradients differ by {worst:.1e} at most, of {len(found)} cases")


@pytest.mark.long
def test_where_a_rank_fails_all_go_on_together_as_stock() -> None:
    found, text = run(failing())
    for case, ranks in found.values():
        plans = [*case["plans"][:FIRST], *[[EACH, EACH]] * (len(case["plans"]) - FIRST)]
        for rank in ranks:
            assert [one["plan"] for one in rank["iterations"]] == plans, case["words"]
            assert all(one["apart"] <= WITHIN for one in rank["iterations"]), case["words"]
            replica = rank["place"][0]
            assert [one["next"] for one in rank["iterations"]] == [
                (iteration + 1) * EACH * 2 + replica for iteration in range(len(plans))
            ]
    # Once per case by rank 0, but where the data end; of what cannot be read by the rank itself.
    line = "replicas run as many microbatches each: from iteration 4 on, as "
    assert text.count(line) == len(FAULTS) - 1
    unread = "cannot read batches of other replicas, training goes on with its own"
    assert text.count(unread) == 1
