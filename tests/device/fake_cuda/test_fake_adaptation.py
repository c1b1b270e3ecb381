"""Trainings with the plugin over the fake machine: links get slow, for NCCL and for the engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import dropwhile, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from fake_trainings import Trained, needs_torch_for_gpus, train
from patience import decided, in_time

pytestmark = [needs_torch_for_gpus, pytest.mark.trains, pytest.mark.timing]
CHANGING = Path(__file__).with_name("pretrain_changing_links.py")
MS = 60  # of a slow link
FACTOR = 1.8  # by which an iteration is shorter at least; three times on an idle machine
LARGE = pytest.mark.large
INTO, BACK = "its messages leave the GPU's queue", "back to Megatron's own messages"
DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "1")
EXECUTOR = ("--adaptra-engine", "executor")
IN_BETWEEN = (
    "--bf16", "--eval-iters", "1", "--eval-interval", "5", "--timing-log-level", "2",
    "--log-memory-interval", "1", "--empty-unused-memory-level", "2",
)  # fmt: skip
# By name: flags, sizes, the links between devices that are that between stages 0 and 1.
ROWS: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "pp2": ((), {}, "0-1"),
    "pp4": ((), {"pipeline": 4}, "0-1"),
    "pp2 x dp2": (DISTRIBUTED, {"ranks": 4}, "0-2;1-3"),
    "chunks": (CHUNKS, {}, "0-1"),
    "in between": (IN_BETWEEN, {}, "0-1"),
}


def changing(
    folder: Path, *flags: str, links: str, at: tuple[int, ...], iterations: int, ms: int = MS,
    script: Path = CHANGING, variables: Mapping[str, str] | None = None, **options: Any,
) -> Trained:  # fmt: skip
    """The links are slow from every second iteration of `at` to the next one there."""
    rules = ";".join(f"{link} {ms}" for link in links.split(";"))
    emulated = [
        word
        for begin, end in list(pairwise(at))[::2]
        for word in ("--adaptra-emulate-link", f"0-1:{ms}ms@{begin}..{end}")
    ]
    path = folder / "links"
    path.write_text("")
    changes = f"{path}|{rules}|{','.join(map(str, at))}"
    return train(
        folder, "--adaptra", *emulated, *flags, iterations=iterations, links=path, script=script,
        variables={"FAKE_LINKS_CHANGE": changes, **(variables or {})}, **options,
    )  # fmt: skip


def decisions(done: Trained) -> list[str]:
    """Log lines about changes of the plan, each with its first iteration (from 0)."""
    found = re.findall(r"adaptra: from iteration (\d+) on, (.*)", done.text)
    return [f"{int(number) - 1} {text}" for number, text in found]


@pytest.mark.parametrize(
    ("name", "engine", "queues"),
    [
        ("pp2 x dp2", "native", 32),
        pytest.param("pp2", "executor", 1, marks=LARGE),  # twice, below
        pytest.param("pp4", "native", 1, marks=LARGE),
        pytest.param("chunks", "native", 1, marks=LARGE),
        pytest.param("in between", "native", 32, marks=LARGE),
    ],
)
def test_messages_leave_the_queue_while_a_link_is_slow(
    name: str, engine: str, queues: int, tmp_path: Path
) -> None:
    flags, sizes, links = ROWS[name]
    at, iterations = (4, 20), 44  # a busy machine plans late
    done = changing(
        tmp_path, *flags, *(EXECUTOR if engine == "executor" else ()), links=links, at=at,
        iterations=iterations, queues=queues, kernel_us=100, **sizes,
    )  # fmt: skip
    assert done.status == 0, done.text[-4000:]
    assert len(done.milliseconds) == iterations, done.text[-4000:]
    assert done.complaints == []
    print(done.milliseconds, *decisions(done), sep="\n")
    found = list(dropwhile(lambda one: INTO not in one, decisions(done)))
    since = int(found[0].split()[0]) if found else -1
    decided("messages leave the queue while the link is slow", at[0] < since < at[1])
    decided("they are back when it is healed", any(BACK in one for one in found[1:]))
    stock, ours = done.milliseconds[at[0] + 1 : at[0] + 3], done.milliseconds[at[1] - 3 : at[1]]
    in_time("an iteration beside stock's", median(ours), median(stock))


def test_a_job_that_observes_leaves_messages_in_the_queue(tmp_path: Path) -> None:
    done = changing(
        tmp_path, "--adaptra-act", "observe", links="0-1", at=(4, 15), iterations=16, queues=1,
        **{"kernel-us": 100},
    )  # fmt: skip
    assert done.status == 0, done.text[-4000:]
    assert done.complaints == []
    assert decisions(done) == []
    would = re.findall("adaptra: would be done, but acting is off: (.*)", done.text)
    decided("what would be done is logged", any(INTO in one for one in would))


@pytest.mark.parametrize(
    "flags", [pytest.param(EXECUTOR, id="executor"), pytest.param((), id="native", marks=LARGE)]
)
def test_a_link_that_is_slow_twice_is_hidden_each_time(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Megatron's own messages are in use when it gets slow, and again when it has healed."""
    at, iterations = (4, 16, 30, 42), 56
    done = changing(
        tmp_path, *flags, links="0-1", at=at, iterations=iterations, queues=1,
        **{"kernel-us": 100},
    )  # fmt: skip
    assert done.status == 0, done.text[-4000:]
    assert done.complaints == []
    print(done.milliseconds, *decisions(done), sep="\n")
    changes = [(int(one.split()[0]), INTO in one, BACK in one) for one in decisions(done)]
    for begin, end, again in zip(at[::2], at[1::2], (*at[2::2], iterations), strict=True):
        there = [i for i, into, _ in changes if into and begin < i < end - 3]
        back = [i for i, _, out in changes if out and end < i < again]
        decided(f"messages leave the queue from iteration {begin} on", bool(there))
        decided(f"they are back from iteration {end} on", bool(back))
        stock = median(done.milliseconds[begin + 1 : begin + 3])
        ours = median(done.milliseconds[end - 3 : end])
        in_time(f"{FACTOR} iterations of ours beside one of stock's", FACTOR * ours, stock)


@pytest.mark.parametrize(
    "flags", [pytest.param((), id="native"), pytest.param(EXECUTOR, id="executor", marks=LARGE)]
)
def test_no_iteration_takes_more_than_a_budget_in_bytes(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Activations on the device, what ops take in passing, and pinned memory, all together."""
    most, at, iterations = 2100 << 10, (6, 18), 40  # a busy machine plans late
    # So slow that only the budget bounds a plan, however long a busy machine makes an op.
    done = changing(
        tmp_path, *flags, "--adaptra-activation-budget", "2100KiB", "--global-batch-size", "8",
        links="0-1", at=at, iterations=iterations, ms=5 * MS,
        script=CHANGING.with_name("pretrain_counting_bytes.py"), **{"kernel-us": 100},
    )  # fmt: skip
    assert done.status == 0, done.text[-4000:]
    plans = decisions(done)
    print(*plans, sep="\n")
    found = re.findall(r"bytes of stage (\d) in iteration (\d+): (\d+) (\d+)\n", done.text)
    rows = [tuple(map(int, words)) for words in found]
    assert len(rows) == 2 * iterations
    filled = [row for row in rows if row[1]]  # the first iteration makes what stays
    over = [row for row in filled if sum(row[2:]) > most]
    assert not over, (over, plans)
    # All eight microbatches would hide the link, and four are what fits.
    decided("a plan for the slow link, of four", any("-> 4,1" in one for one in plans))
    assert max(sum(row[2:]) for row in filled) > 0.9 * most
    assert any(pinned for *_, pinned in rows)
    since = [int(one.split()[0]) for one in plans]
    back = next((i for i, one in zip(since, plans, strict=True) if BACK in one), iterations)
    there = back + 4  # whatever a busy machine leads to afterwards
    undisturbed = not any(back < i <= there for i in since)
    decided("the way back, and no other plan soon", undisturbed and there < iterations)
    assert not any(pinned for _, i, _, pinned in rows if i == there), "given back"


@LARGE
def test_an_evaluation_of_twice_all_time_limits_is_survived(tmp_path: Path) -> None:
    """As one of 20 minutes where limits are ten: with our messages, after them, and before."""
    at, limit = (4, 18), 5
    done = changing(
        tmp_path, "--eval-iters", "1", "--eval-interval", "14", "--adaptra-timeout", str(limit),
        links="0-1", at=at, iterations=32, timeout=240,
        script=CHANGING.with_name("pretrain_long_evaluations.py"),
        variables={"FAKE_EVALUATION_S": str(2 * limit)}, **{"kernel-us": 100},
    )  # fmt: skip
    assert done.status == 0, done.text[-4000:]
    assert done.complaints == []
    assert len(done.milliseconds) == 32, done.text[-4000:]
    for iteration in (14, 28):
        assert f"validation loss at iteration {iteration} |" in done.text
    # Nobody was given up meanwhile.
    assert not re.search("adaptra: .*(lost|silent|given up|waited)", done.text), done.text[-4000:]
    for what in (INTO, BACK):
        decided(what, any(what in one for one in decisions(done)))
