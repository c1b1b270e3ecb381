"""A planner in a process of its own: what it answers is what this process would find, or nothing.

How one that dies, stops or does not read is replaced: test_route_process.py.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapt.voted_group import BUFFER, VotedGroup
from plan.all_reduce_patterns import KINDS, drawn
from seeding import new_seed
from transport.ranks import until

from benchmarks.common import equal_ports
from megatron_adaptra.adapt import planning_process
from megatron_adaptra.adapt.planning_process import PlanningProcess
from megatron_adaptra.adapt.reductions import remedy as loop
from megatron_adaptra.adapt.reductions.remedy import LOOK, ChoiceProcess
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import PlanningFailed
from megatron_adaptra.base.processes import descendants
from megatron_adaptra.plan.reductions import selector
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Figures
from megatron_adaptra.plan.server import NICE, choose

Serve = Callable[[str], None]
# A process that answers line after line; ANSWER is an expression of `line` and `number`.
SERVER = """
import json, sys
for line in sys.stdin:
    number = json.loads(line)["number"]
    sys.stdout.write(ANSWER)
    sys.stdout.flush()
"""
LATE = Figures(3_200_000, equal_ports([20e6] * 4, 0.3e-3, 0.1e-3), (0.0, 0.0, 0.16, 0.0), 0.6)
GOOD = choose(LATE, Choice(4), 0.05).to_json()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """From now on processes run SERVER with this answer; with "" they run what they should."""

    def run(answer: str) -> None:
        if answer:
            words = [sys.executable, "-c", SERVER.replace("ANSWER", answer)]
            monkeypatch.setattr(planning_process, "command", lambda module: words)
        else:
            monkeypatch.undo()

    return run


@pytest.fixture
def process() -> Iterator[ChoiceProcess]:
    process = ChoiceProcess()
    yield process
    process.close()
    assert process._process is None


def pid(process: PlanningProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_it_chooses_what_this_process_would(process: ChoiceProcess) -> None:
    rng, numbers = random.Random(new_seed()), set()
    for kind in KINDS[::2]:
        figures, _ = drawn(rng, kind)
        for now in (Choice(figures.ranks), Choice(figures.ranks, sharded=True)):
            assert process(figures, now, 0.0) == choose(figures, now, 0.0)
            numbers.add(pid(process))
    assert len(numbers) == 1


def test_a_training_comes_first_whatever_its_priority(process: ChoiceProcess) -> None:
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError as error:
        pytest.skip(f"no real-time priority here: {error}")
    try:
        process(LATE, Choice(4), 0.05)
    finally:
        os.sched_setscheduler(0, *before)
    assert os.sched_getscheduler(pid(process)) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, pid(process)) >= NICE


NONSENSE = {
    "no JSON": r'"nonsense\n"',
    "no object": r'"[1, 2]\n"',
    "a number alone": r'"3\n"',
    "no number": r'json.dumps(GOOD) + "\n"',
    "an answer to an earlier request": r'json.dumps(GOOD | {"number": number - 1}) + "\n"',
    "two lines": r'2 * (json.dumps(GOOD | {"number": number}) + "\n")',
    "nothing in it": r'json.dumps({"number": number}) + "\n"',
    "more in it": r'json.dumps(GOOD | {"number": number, "more": 1}) + "\n"',
    "no seconds": r'json.dumps(GOOD | {"number": number, "seconds": "1"}) + "\n"',
    "endless seconds": r'json.dumps(GOOD | {"number": number, "native": 1e999}) + "\n"',
    "of no builder": r'json.dumps(GOOD | {"number": number, "choice": {"ranks": 4}}) + "\n"',
    "for other ranks": r'json.dumps(GOOD | {"number": number, "choice": OTHER}) + "\n"',
    "for shards": r'json.dumps(GOOD | {"number": number, "choice": SHARDS}) + "\n"',
    "its end": r'sys.exit(3) or ""',
}


@pytest.mark.long
@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_ends_the_process_and_another_one_takes_its_place(
    answer: str, process: ChoiceProcess, serve: Serve
) -> None:
    for name, value in (
        ("GOOD", GOOD),
        ("OTHER", Choice(5).to_json()),
        ("SHARDS", Choice(4, sharded=True).to_json()),
    ):
        answer = answer.replace(name, repr(value))
    serve(answer)
    with pytest.raises(PlanningFailed):
        process(LATE, Choice(4), 0.05)
    assert process._process is None
    serve("")
    assert process(LATE, Choice(4), 0.05) == choose(LATE, Choice(4), 0.05)


def test_an_endless_answer_is_none(
    process: ChoiceProcess, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning_process, "_LONGEST", 1 << 20)
    serve(r'"x" * (1 << 22)')
    with pytest.raises(PlanningFailed, match="answers without end"):
        process(LATE, Choice(4), 0.05)


def unread(process: ChoiceProcess) -> int:
    """Bytes of a request that the process has not read."""
    assert process._process is not None
    assert process._process.stdin is not None
    count = fcntl.ioctl(process._process.stdin, termios.FIONREAD, bytes(4))
    return int.from_bytes(count, sys.byteorder)


def test_a_close_ends_a_request_that_waits(
    process: ChoiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process(LATE, Choice(4), 0.05)
    monkeypatch.setattr(waits, "SEARCH", 20.0)  # after which it would fail all the same
    first = pid(process)
    os.kill(first, signal.SIGSTOP)
    # Until then it may still read the request.
    stopped = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    until(lambda: os.waitid(os.P_PID, first, stopped) is not None, "it has stopped")
    failed: list[str] = []

    def ask() -> None:
        try:
            process(LATE, Choice(4), 0.05)
        except PlanningFailed as error:
            failed.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: bool(failed) or unread(process) > 0, "it waits")
    assert failed == []
    process.close()
    thread.join()
    assert failed == [f"ConnectionError: process {first} has ended"]
    assert first not in descendants()
    with pytest.raises(PlanningFailed, match="the training has ended"):
        process(LATE, Choice(4), 0.05)


def test_a_group_chooses_in_another_process(tmp_path: Path) -> None:
    """And ends it with itself. A choice of this process would not be made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selector, "_Search", _never)
        group = VotedGroup(4, tmp_path / "decisions.jsonl")
        group.train(12)
        assert group.loop.remedy._planner._process is None  # nothing has stood out
        ran = group.train(11, {2: BUFFER})
        assert not ran[-1].native
        chooses = pid(group.loop.remedy._planner)
        group.close()
    assert chooses not in descendants()


def test_what_delays_cannot_gain_of_shards_is_not_searched_for(tmp_path: Path) -> None:
    """0.3 ms from host to host is too little for 8 ranks, 3 ms may be enough."""
    group = VotedGroup(8, tmp_path / "decisions.jsonl", sharded=True)
    group.train(LOOK)
    first = group.loop.remedy._planner._number  # ports that were unknown before
    group.train(3 * LOOK)
    assert group.loop.remedy._planner._number == first
    group.delay = 3e-3
    group.train(2 * LOOK)
    assert group.loop.remedy._planner._number > first
    group.close()


def _never(*args: Any) -> Any:
    raise AssertionError("chosen on a thread of the training")


@pytest.mark.parametrize("answer", ['"nonsense\\n"', 'sys.exit(3) or ""'], ids=["nonsense", "dies"])
def test_while_nothing_can_be_chosen_what_is_in_force_stays(
    answer: str, tmp_path: Path, serve: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    popen = subprocess.Popen

    def count(*args: Any, **kwargs: Any) -> Any:
        started.append(args)
        return popen(*args, **kwargs)

    group = VotedGroup(4, tmp_path / "decisions.jsonl")
    group.train(12)
    serve(answer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning_process.subprocess, "Popen", count)
        assert all(one.native for one in group.train(20, {2: BUFFER}))
    assert 2 <= len(started) <= 20 / loop.WINDOW  # it is tried again, but not in each iteration
    serve("")
    assert not group.train(11, {2: BUFFER})[-1].native
    group.close()
    assert capfd.readouterr().err.count("the choice of an all-reduce has failed") == 1
