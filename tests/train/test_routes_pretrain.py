"""Routes between replicas in Megatron's own training program, and where there can be none."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from patience import decided
from running import zygote
from trainings import (
    DROPOUT,
    EVALUATION,
    HALF,
    SCRIPT,
    Done,
    close,
    digests,
    needs_training,
    stock,
    train,
    words_of,
)

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule, warmup_of
from megatron_adaptra.plan.pipeline.fixed import first_schedule
from megatron_adaptra.plan.routes.reroute import plan_replicas

pytestmark = [needs_training, pytest.mark.timeout(1200)]

RANKS, COUNT = 4, 4  # two replicas of two stages, with as many microbatches each
FEW, SAVED = 8, 4  # iterations; that whose checkpoint is resumed
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
SWAP = ("--adaptra", "--adaptra-reroute", "swap")
AUTO = ("--adaptra", "--adaptra-reroute", "auto", "--adaptra-engine", "executor")


def planned(move: str) -> Schedule:
    """Last stages exchanged; or worker 1.1 takes four times as long, or runs nothing at all."""
    if move == "swap":
        start = first_schedule(2, COUNT, float("inf")).replicated(2)
        a, b, c, d = start.order
        return replace(start, order=(a, d, c, b), policy="swap", why="partners exchanged")
    even = (0.01, 0.01)
    pipeline = Conditions(COUNT, even, even, (0.0, 0.0))
    if move == "idle":
        return plan_replicas(ReplicaConditions(pipeline, 2, frozenset({3}))).schedule
    moves = plan_replicas(ReplicaConditions(pipeline, 2, slow={3: 4.0})).moves
    return next(one.schedule for one in moves if one.name == move)


def routed(folder: Path, move: str, *flags: str, resumed: bool = False) -> Done:
    """A training in which microbatches run away from home from the start.

    By this plan, or by that of the checkpoint from which it is `resumed`.
    """
    schedule = planned(move)
    words = words_of(folder, RANKS, *HALF, *flags, iterations=FEW)
    done = zygote(True).run(
        folder,
        [str(SCRIPT.with_name("routes_pretrain.py")), *words[1:]],
        ranks=RANKS,
        environment={"ROUTES": "" if resumed else schedule.text()},
        ends=False,
    )
    assert done.status == 0, done.text[-4000:]
    assert "does not fit" not in done.text
    ours = Done(0, done.text)
    depths = [warmup_of(schedule.order[worker]) for worker in range(RANKS)]
    first = SAVED if resumed else 0
    assert ours.plans == [depths] * (FEW - first - 1)  # the first iteration is stock's
    return ours


def read_away(folder: Path) -> list[int]:
    """In which iterations a worker has read samples of the other replica alone."""
    (home, away), reads = ({2: 0, 3: 1}, {2: 1, 3: 0}), defaultdict[int, set[bool]](set)
    for rank in home:
        for line in (folder / f"rank{rank}").read_text().splitlines():
            kind, iteration, *numbers = line.split()
            if kind == "train":
                (replica,) = {int(number) % 2 for number in numbers}
                assert replica in (home[rank], away[rank])
                reads[int(iteration)].add(replica == away[rank])
    return [iteration for iteration, found in reads.items() if found == {True}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routes")


def test_whole_swaps_keep_every_bit_and_are_resumed(folder: Path) -> None:
    flags = (*DROPOUT, *EVALUATION, "--save-interval", str(SAVED))
    (samples := folder / "samples").mkdir()
    kept = ("--save", str(folder / "saved"), "--user-samples", str(samples))
    ours = routed(folder, "swap", *flags, *SWAP, *kept)
    theirs = stock(RANKS, *HALF, *flags, iterations=FEW)
    assert ours.numbers == theirs.done.numbers
    assert ours.evaluated == theirs.done.evaluated
    assert digests(folder) == theirs.digests
    assert read_away(samples) == list(range(2, FEW + 1))
    (folder / "saved" / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    (more := folder / "more").mkdir()
    load = (*DROPOUT, "--load", str(folder / "saved"))
    again = routed(folder, "swap", *load, *SWAP, "--user-samples", str(more), resumed=True)
    assert read_away(more) == list(range(SAVED + 2, FEW + 1))
    assert again.numbers == train(folder, RANKS, *HALF, *load, iterations=FEW).numbers


MOVED = {
    "an idle worker, sharded and overlapped, loader's processes": (
        "idle", (*SHARDED[:2], "--num-workers", "2")
    ),
    "iterations run again": (
        "re-route", ("--rerun-mode", "validate_results", "--user-doubt", "1:3,0:5,1:6")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_moved_microbatches_change_losses_by_rounding(name: str, tmp_path: Path) -> None:
    move, flags = MOVED[name]
    ours = routed(tmp_path, move, *AUTO, *flags)
    close(ours, stock(RANKS, *HALF, *flags, iterations=FEW).done)


REFUSED = {
    "another loader": (
        ("--dataloader-type", "cyclic"),
        "work for other replicas is not possible: the data come from a RerunDataIterator, not "
        "from Megatron's loader",
    ),
    "parameters gathered in forwards": (
        SHARDED,
        "a microbatch that leaves the order of its replica is not possible: "
        "--overlap-param-gather needs a forward on each worker",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_where_there_can_be_no_routes_one_line_says_why(name: str, tmp_path: Path) -> None:
    flags, words = REFUSED[name]
    done = train(tmp_path, RANKS, *HALF, *AUTO, *flags, iterations=3)
    lines = re.findall(r"^adaptra: (.*)", done.text, re.MULTILINE)
    assert [line for line in lines if "replica" in line] == [words]
    assert len(done.numbers) == 3


@pytest.mark.timing
def test_without_routes_each_replica_still_adapts(tmp_path: Path) -> None:
    flags = (*HALF, "--user-loss", "all")
    slow = ("--adaptra-emulate-link", "0.0-0.1:100ms")
    ours = train(tmp_path, RANKS, *flags, *AUTO, *slow, iterations=20)
    assert (
        "replicas run the same order of ops, and no work moves between them: __main__.loss calls "
        "all_reduce over ranks 2, 3 in a forward"
    ) in ours.text
    changes = re.findall(r"adaptra: from iteration \d+ on, (.*)", ours.text)
    assert not re.search(r" run (on replica|on worker|each other's) ", "\n".join(changes))
    assert ours.printed == stock(RANKS, *flags, iterations=20).done.printed
    decided("a plan before the training ends", changes != [])
