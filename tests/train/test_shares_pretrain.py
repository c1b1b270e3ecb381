"""Shares of an iteration between replicas in Megatron's own training program."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
from running import zygote
from trainings import (
    EVALUATION,
    HALF,
    Done,
    auxiliary,
    close,
    needs_training,
    stock,
    train,
    words_of,
)

from megatron_adaptra.ir.sync import SyncPlan

pytestmark = [needs_training, pytest.mark.timeout(1200)]

BATCH, ITERATIONS = 8, 8
ONE = ("--pipeline-model-parallel-size", "1")
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
EXPERTS = (
    "--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "5",
    "--moe-router-load-balancing-type", "aux_loss", "--disable-bias-linear",
)  # fmt: skip


SKIPPED = "--iterations-to-skip"


def by(*counts: int) -> tuple[str, ...]:
    """Flags of a training under these counts."""
    words = ",".join(map(str, counts))
    return ("--adaptra", "--adaptra-sync", "share", "--adaptra-sync-counts", words)


def samples(folder: Path, stages: int) -> dict[int, dict[int, list[int]]]:
    """By iteration and replica, the samples that its ranks have trained on, in order."""
    found: dict[int, dict[int, list[int]]] = defaultdict(dict)
    ranks = sorted(folder.glob("rank*"), key=lambda path: int(path.name[4:]))
    replicas = len(ranks) // stages  # as far apart are the stages of a pipeline
    for rank, path in enumerate(ranks):
        replica = rank % replicas
        rows: dict[int, list[int]] = defaultdict(list)
        for kind, iteration, *numbers in map(str.split, path.read_text().splitlines()):
            if kind == "train":
                rows[int(iteration)] += map(int, numbers)
        for iteration, numbers in rows.items():
            before = found[iteration].setdefault(replica, numbers)
            assert before == numbers, "the ranks of a replica read the same"
    return found


def wanted(counts: list[int], iteration: int) -> dict[int, list[int]]:
    """By replica, what counts have it train on in an iteration, from 1 on."""
    replicas = len(counts)
    plan, first = SyncPlan(BATCH // replicas, tuple(counts)), (iteration - 1) * BATCH
    return {
        replica: [first + j * replicas + home for home, j in plan.share(replica)]
        for replica in range(replicas)
    }


def test_charts_show_counts_and_who_comes_late(tmp_path: Path) -> None:
    """The last rank writes them; of the first ranks each is not late."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    charts = ("--tensorboard-dir", str(tmp_path / "charts"), "--tensorboard-log-interval", "1")
    auto = ("--adaptra-allreduce", "auto")
    train(tmp_path, 2, *ONE, *by(5, 3), *auto, *charts, iterations=ITERATIONS)
    written = events.EventAccumulator(str(tmp_path / "charts"))
    written.Reload()

    def shown(name: str) -> dict[int, float]:
        return {one.step: one.value for one in written.Scalars(f"adaptra/{name}")}

    assert [shown(f"microbatches/replica-{r}")[ITERATIONS] for r in (0, 1)] == [5, 3]
    assert set(shown("by-plan/gradients").values()) <= {0, 1}
    first, second = (shown(f"late-ms/gradients/rank-{rank}") for rank in (0, 1))
    assert len(first) >= ITERATIONS / 2
    assert first.keys() == second.keys()
    assert all(min(first[step], second[step]) == 0 for step in first)
    assert max(*first.values(), *second.values()) > 0


SHARED = {
    "one stage, four replicas, evaluations, loader's processes, a loss per token": (
        4, (3, 1, 2, 2),
        (*ONE, *EVALUATION, "--num-workers", "1", "--calculate-per-token-loss"), (),
    ),
    "two stages, experts with a loss of their own, sharded and overlapped": (
        4, (5, 3), (*HALF, *SHARDED, *EXPERTS), (),
    ),
    "two stages, executor, skipped one by one and in a row, one run again": (
        4, (3, 5),
        (*HALF, "--rerun-mode", "validate_results", "--user-doubt", "1:5,0:7",
         SKIPPED, "1", "3", "4", "6"),
        ("--adaptra-engine", "executor"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_a_training_is_stocks_but_for_the_order_of_sums(name: str, tmp_path: Path) -> None:
    ranks, counts, flags, more = SHARED[name]
    (folder := tmp_path / "samples").mkdir()
    kept = ("--user-samples", str(folder))
    ours = train(tmp_path, ranks, *flags, *by(*counts), *more, *kept, iterations=ITERATIONS)
    close(ours, stock(ranks, *flags, iterations=ITERATIONS).done)
    assert len(auxiliary(ours)) == (ITERATIONS if "--num-experts" in flags else 0)
    skipped = set(map(int, flags[flags.index(SKIPPED) + 1 :])) if SKIPPED in flags else set()
    first, second, *_ = trained = sorted(set(range(1, ITERATIONS + 1)) - skipped)
    words = f"from iteration {second} on, replicas run {','.join(map(str, counts))} micro"
    assert words in ours.text
    replicas = len(counts)
    found = samples(folder, ranks // replicas)
    assert sorted(found) == trained
    again = {5, 7} if "--user-doubt" in flags else set()
    for iteration, rows in found.items():
        plan = list(counts) if iteration > first else [BATCH // replicas] * replicas
        once = wanted(plan, iteration)
        assert rows == {r: row * (1 + (iteration in again)) for r, row in once.items()}
        every = sorted(number for row in once.values() for number in row)
        assert every == list(range((iteration - 1) * BATCH, iteration * BATCH))


SAVED = 3  # the iteration whose checkpoint is resumed


def test_resumed_with_other_counts_each_sample_is_read_once_in_order(
    tmp_path: Path,
) -> None:
    """The first iteration after the start runs as stock. Evaluations read other samples."""
    flags = (*ONE, *EVALUATION)
    saves = ("--save", str(tmp_path / "saved"), "--save-interval", str(SAVED))
    runs = {
        "first": ([2, 6], (*saves, "--exit-interval", str(SAVED))),
        "then": ([5, 3], ("--load", str(tmp_path / "saved"))),
        "stock": ([4, 4], ("--load", str(tmp_path / "saved"))),
    }
    ended = {}
    for name, (counts, wanted_flags) in runs.items():
        (folder := tmp_path / f"samples {name}").mkdir()
        asked = by(*counts) if name != "stock" else ()
        words = (*flags, *wanted_flags, *asked, "--user-samples", str(folder))
        ended[name] = train(tmp_path / name, 2, *words, iterations=ITERATIONS)
        first, last = (1, SAVED) if name == "first" else (SAVED + 1, ITERATIONS)
        found = samples(folder, 1)
        assert sorted(found) == list(range(first, last + 1))
        for iteration, rows in found.items():
            assert rows == wanted([4, 4] if iteration == first else counts, iteration)
    assert len(ended["then"].numbers) == ITERATIONS - SAVED
    close(ended["then"], ended["stock"])


def ramped(folder: Path, *flags: str) -> Done:
    """A training of 4 samples an iteration, then of 8, then of 12."""
    words = words_of(folder, 4, *HALF, *flags, iterations=9)
    at = words.index("--global-batch-size")
    words[at : at + 2] = ["--step-batch-size-schedule", "0:4 256:8 768:12"]  # tokens
    done = zygote("--adaptra" in flags).run(folder, words, ranks=4)
    assert done.status == 0, done.text[-4000:]
    return Done(0, done.text)


def test_a_batch_size_that_steps_up_begins_anew_with_stocks_shares(tmp_path: Path) -> None:
    """The counts are for the last one."""
    ours, theirs = ramped(tmp_path / "ours", *by(2, 10)), ramped(tmp_path / "stock")
    close(ours, theirs)
    assert [int(row[1]) for row in theirs.numbers] == [4, 8, 16, 24, 36, 48, 60, 72, 84]
    assert re.findall(r"(?:from iteration \d+ on, )?replicas run .*", ours.text) == [
        "replicas run 2 microbatches each: --adaptra-sync-counts '2,10': they have to add up to "
        "the global batch, 4 microbatches (2 x 2), not to 12",
        "replicas run 4 microbatches each: --adaptra-sync-counts '2,10': they have to add up to "
        "the global batch, 8 microbatches (2 x 4), not to 12",
        "from iteration 6 on, replicas run 2,10 microbatches",
    ]


BESIDE = (
    "--adaptra", "--adaptra-sync", "auto", "--adaptra-reroute", "auto", "--adaptra-engine",
    "executor", "--adaptra-allreduce", "auto", "--adaptra-min-gain", "1000",
)  # fmt: skip


def test_auto_beside_routes_and_reductions_is_stocks_where_nothing_changes(tmp_path: Path) -> None:
    """The first iteration is watched for all of them at once, by Megatron's own loader."""
    ours = train(tmp_path, 4, *HALF, *BESIDE, iterations=ITERATIONS)
    assert ours.numbers == stock(4, *HALF, iterations=ITERATIONS).done.numbers
    for words in ("is not possible", "replicas run", "planned by itself", "has failed"):
        assert words not in ours.text, ours.text[-2000:]


def test_where_there_can_be_no_shares_one_line_says_why_and_all_is_stocks(tmp_path: Path) -> None:
    flags = (*HALF, "--user-loss", "all")
    ours = train(tmp_path, 4, *flags, *by(5, 3), iterations=4)
    (line,) = re.findall(r"^adaptra: (.*replicas run as many .*)", ours.text, re.MULTILINE)
    why = "rank 2: __main__.loss calls all_reduce over ranks 2, 3 in a forward"
    assert line.startswith(f"replicas run as many microbatches each: {why}")
    assert ours.numbers == stock(4, *flags, iterations=4).done.numbers


def test_counts_that_do_not_fit_end_the_job_before_it_starts(tmp_path: Path) -> None:
    """What it says: test_shares.py."""
    words = words_of(tmp_path, 2, *ONE, *by(8, 5), iterations=2)
    done = zygote(True).run(tmp_path, words, ranks=2)
    assert 2 in done.statuses
    assert set(done.statuses) <= {2, -15}, "a rank may be ended as the other one has ended"
    assert not Done(0, done.text).lines
