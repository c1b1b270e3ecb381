"""Routes between replicas in Megatron's own training program, and where there can be none."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from patience import decided, in_time
from running import zygote
from trainings import (
    DROPOUT,
    EVALUATION,
    HALF,
    SCRIPT,
    Done,
    digests,
    needs_training,
    stock,
    train,
    words_of,
)

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule, warmup_of
from megatron_adaptra.plan.reroute import plan_replicas

pytestmark = [needs_training, pytest.mark.timeout(1200)]

RANKS, COUNT = 4, 6  # two replicas of two stages, with as many microbatches each
ITERATIONS, FEW = (
    30,
    12,
)  # until there is a plan and a while longer; where it is there from the start
SAVED = 20  # the iteration whose checkpoint is resumed
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
SWAPS = (
    "--adaptra", "--adaptra-reroute", "swap", "--adaptra-emulate-link", "0.0-0.1:100ms",
)  # fmt: skip
AUTO = ("--adaptra", "--adaptra-reroute", "auto", "--adaptra-engine", "executor")
SAVES = ("--save-interval", "10")


def decisions(done: Done) -> list[str]:
    return re.findall(r"adaptra: from iteration \d+ on, (.*)", done.text)


def moved(done: Done) -> bool:
    return any(" run on replica " in line or " on worker " in line for line in decisions(done))


def swapped(done: Done) -> bool:
    return any("run each other's microbatches" in line for line in decisions(done))


SWAPPED = {
    "dropout, evaluations": (*DROPOUT, *EVALUATION, *SAVES),
}


@pytest.mark.timing
@pytest.mark.parametrize("name", SWAPPED)
def test_whole_swaps_keep_every_bit(name: str, tmp_path: Path) -> None:
    flags = (*HALF, *SWAPPED[name])
    saves = ("--save", str(tmp_path / "saved")) if SAVES[0] in flags else ()
    ours = train(tmp_path, RANKS, *flags, *SWAPS, *saves, iterations=ITERATIONS)
    theirs = stock(RANKS, *flags, iterations=ITERATIONS)
    assert len(ours.numbers) == ITERATIONS
    assert ours.numbers == theirs.done.numbers
    assert ours.evaluated == theirs.done.evaluated
    if saves:
        assert digests(tmp_path) == theirs.digests
    decided("partners exchanged before the training ends", swapped(ours))


def planned(move: str) -> Schedule:
    """Worker 1.1 takes four times as long, or runs nothing at all."""
    even = (0.01, 0.01)
    pipeline = Conditions(COUNT, even, even, (0.0, 0.0))
    if move == "idle":
        return plan_replicas(ReplicaConditions(pipeline, 2, frozenset({3}))).schedule
    moves = plan_replicas(ReplicaConditions(pipeline, 2, slow={3: 4.0})).moves
    return next(one.schedule for one in moves if one.name == move)


def routed(folder: Path, move: str, *flags: str) -> Done:
    """A training in which microbatches run away from home from the start."""
    words = words_of(folder, RANKS, *HALF, *AUTO, *flags, iterations=FEW)
    script = str(SCRIPT.with_name("routes_pretrain.py"))
    schedule = planned(move)
    assert schedule.routes.moved
    assert (move == "idle") == (not schedule.order[3])
    done = zygote(True).run(
        folder,
        [script, *words[1:]],
        ranks=RANKS,
        environment={"ROUTES": schedule.text()},
        ends=False,
    )
    assert done.status == 0, done.text[-4000:]
    assert "does not fit" not in done.text
    ours = Done(0, done.text)
    depths = [warmup_of(schedule.order[worker]) for worker in range(RANKS)]
    assert ours.plans == [depths] * (FEW - 1)  # the first iteration is stock's
    return ours


MOVED = {
    "shifted, sharded and overlapped, loader's processes": (
        "shift", (*SHARDED[:2], "--num-workers", "2")
    ),
    "an idle worker, sharded and overlapped": ("idle", SHARDED[:2]),
    "iterations run again": (
        "re-route", ("--rerun-mode", "validate_results", "--user-doubt", "1:5,0:7,1:9")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_moved_microbatches_change_losses_by_rounding(name: str, tmp_path: Path) -> None:
    move, flags = MOVED[name]
    ours = routed(tmp_path, move, *flags)
    theirs = stock(RANKS, *HALF, *flags, iterations=FEW).done
    for mine, other in zip(ours.numbers, theirs.numbers, strict=True):
        for place, (a, b) in enumerate(zip(mine, other, strict=True)):
            within = {3: 1e-5, 5: 2e-3}.get(place)  # the loss; the norm, of which 4 digits are seen
            assert (float(a) == pytest.approx(float(b), rel=within)) if within else a == b, mine
    evaluated = [re.findall(r"[\d.]+E[+-]\d+", " ".join(x.evaluated)) for x in (ours, theirs)]
    assert [float(x) for x in evaluated[0]] == pytest.approx(
        [float(x) for x in evaluated[1]], rel=1e-5
    )


def test_dropout_falls_by_home_whatever_the_routes(tmp_path: Path) -> None:
    """Also in an iteration that Megatron runs again, and compares with its first run."""
    doubts = ("--rerun-mode", "validate_results", "--user-doubt", "1:5,0:7")
    ways = {"re-route": (), "shift": (), "idle": doubts}
    norms, losses = [], []
    for move, flags in ways.items():
        (folder := tmp_path / move).mkdir()
        done = routed(folder, move, *DROPOUT, *flags)
        assert " is not possible: " not in done.text
        again = done.text.count("unexpected result is reproducible within the tolerance")
        assert again == (2 if flags else 0)
        norms.append([float(norm) for _, norm in done.printed])
        losses.append([float(loss) for loss, _ in done.printed])
    assert len(losses[0]) == FEW
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-5)
    for found in norms[1:]:
        assert found == pytest.approx(norms[0], rel=2e-3)
    theirs = stock(RANKS, *HALF, *DROPOUT, iterations=FEW).done
    apart = [abs(a - float(b)) for a, (b, _) in zip(losses[0], theirs.printed, strict=True)]
    assert max(apart) > 1e-4, "what is compared has dropout in it"


def test_a_loss_that_is_no_sum_is_reported_by_idle_workers_too(tmp_path: Path) -> None:
    """Megatron's last rank is idle, and prints what the other replica's microbatches had."""
    flags = ("--user-loss", "mean")
    ours = routed(tmp_path, "idle", *flags)
    theirs = stock(RANKS, *HALF, *flags, iterations=FEW).done
    norms = [[float(norm) for _, norm in done.printed] for done in (ours, theirs)]
    losses = [[float(loss) for loss, _ in done.printed] for done in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=2e-3)
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


@functools.cache
def saved(folder: Path) -> tuple[Done, Path]:
    """A training that has saved its checkpoint under routes."""
    flags = (*HALF, *DROPOUT, *SAVES, "--save", str(folder / "saved"), *SWAPS)
    done = train(folder, RANKS, *flags, "--exit-interval", str(SAVED), iterations=ITERATIONS)
    last = decisions(done)[-1:]
    decided("partners exchanged when it is saved", "run each other's" in "".join(last))
    assert (folder / "saved" / "latest_checkpointed_iteration.txt").read_text() == str(SAVED)
    return done, folder / "saved"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routes")


def from_saved(folder: Path, name: str, ranks: int, *flags: str) -> Done:
    _, where = saved(folder)
    load = ("--load", str(where), *DROPOUT)
    return train(folder / name, ranks, *HALF, *load, *flags, iterations=ITERATIONS)


@pytest.mark.timing
def test_a_resumed_training_keeps_its_routes_and_stocks_bits(folder: Path) -> None:
    ours = from_saved(folder, "same", RANKS, *SWAPS)
    theirs = from_saved(folder, "stock", RANKS)
    assert not [line for line in ours.text.splitlines() if "does not fit" in line]
    assert len(ours.numbers) == ITERATIONS - SAVED
    assert ours.numbers == theirs.numbers
    # They are in force from the first iteration on; without, six microbatches wait for the path.
    decided("no decision", decisions(ours) == [])
    in_time("milliseconds of an iteration", ours.milliseconds(), 6 * 100)


REFUSED = {
    "another loader": (
        RANKS, ("--dataloader-type", "cyclic"),
        "work for other replicas is not possible: the data come from a RerunDataIterator, not "
        "from Megatron's loader",
    ),
    "a loss over replicas": (
        RANKS, ("--user-loss", "all"),
        "replicas run the same order of ops, and no work moves between them: __main__.loss calls "
        "all_reduce over ranks 2, 3 in a forward",
    ),
    "parameters gathered in forwards": (
        RANKS, SHARDED,
        "a microbatch that leaves the order of its replica is not possible: "
        "--overlap-param-gather needs a forward on each worker",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_where_there_can_be_no_routes_one_line_says_why(name: str, tmp_path: Path) -> None:
    ranks, flags, words = REFUSED[name]
    asked = AUTO[:3] if "--adaptra-engine" in flags else AUTO
    done = zygote(True).run(
        tmp_path,
        words_of(tmp_path, ranks, *HALF, *asked, *flags, iterations=3),
        ranks=ranks,
        ends=False,
    )
    assert done.status == 0, done.text[-4000:]
    lines = re.findall(r"^adaptra: (.*)", done.text, re.MULTILINE)
    assert "\n".join(line for line in lines if "replica" in line) == words
    assert len(Done(0, done.text).numbers) == 3


@pytest.mark.timing
@pytest.mark.parametrize(
    ("flags", "slow"),
    [
        (("--dataloader-type", "cyclic"), ("--adaptra-emulate-link", "0.0-0.1:100ms")),
        (("--user-loss", "all"), ("--adaptra-emulate-link", "0.0-0.1:100ms")),
    ],
)
def test_without_routes_each_replica_still_adapts(
    flags: tuple[str, ...], slow: tuple[str, ...], tmp_path: Path
) -> None:
    ours = train(tmp_path, RANKS, *HALF, *AUTO, *flags, *slow, iterations=ITERATIONS)
    assert not moved(ours)
    assert not swapped(ours)
    assert ours.printed == stock(RANKS, *HALF, *flags, iterations=ITERATIONS).done.printed
    decided("a plan before the training ends", decisions(ours) != [])
