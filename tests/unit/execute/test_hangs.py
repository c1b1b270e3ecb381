"""Hangs: where a thread is blocked, who is at the end of a chain of waits, and what is logged."""

import os
import queue
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transport.ranks import Processes, until

from megatron_adaptra.base import waits
from megatron_adaptra.execute.blocked import blocked
from megatron_adaptra.execute.failure_log import FailureLog
from megatron_adaptra.execute.hang_watch import HangWatch, in_front
from megatron_adaptra.execute.waiting import Waiting, describe_ends
from megatron_adaptra.execute.watchdog import Watchdog
from megatron_adaptra.ir.op import Op


def note(rank, waits=(), **more):
    does = more.pop("does", "is in f (user.py:3)")
    return rank, Waiting(f"rank {rank}", 7, does, waits, **more)


def judge(*notes, start=0, world=range(4)):
    return describe_ends(start, dict(notes), world, lambda rank: f"rank {rank}")


def test_the_end_of_a_chain_keeps_the_job_waiting():
    notes = note(0, (1,), op="B0"), note(1, (2,), op="B0"), note(2, under_way="F1")
    assert judge(*notes) == (
        "the job waits for rank 2, which is in f (user.py:3); first missing op: F1 of rank 2"
    )


def test_a_rank_without_a_note_is_missing_with_what_others_wait_for():
    text = judge(note(0, (1,), op="B3"), note(2, (1,), op="F4"))
    assert text.startswith("the job waits for rank 1, which has reported no wait: it is stopped")
    assert text.endswith("; first missing op: B3 of rank 1")


def test_a_collective_is_followed_to_the_rank_that_is_not_in_it():
    notes = [note(rank, (0, 1, 2), together=True) for rank in (0, 1)]
    text = judge(*notes, note(2, (3,), op="F0"))
    assert text.startswith("the job waits for rank 3, which has")
    text = judge(*notes, note(2))
    assert "waits for rank 2, which is in f" in text
    assert judge(note(2), start=2).endswith("first missing op: what rank 2 is in")
    assert text.endswith("first missing op: the part of rank 2 in what others are in")


def test_a_collective_in_which_all_are_is_stuck_itself():
    notes = [note(rank, tuple({0, 1, 2} - {rank}), together=True) for rank in range(3)]
    assert judge(*notes).startswith("all 3 ranks are in that collective: none is missing")


def test_a_message_that_was_sent_and_has_not_arrived_is_lost():
    notes = note(0, (1,), op="B0", done=("SF0", "SF1")), note(1, (0,), op="F1", done=("F0",))
    for start in (0, 1):
        text = judge(*notes, start=start)
        assert "the message F1 from rank 0, which has sent it, to rank 1" in text
        assert text.endswith("first missing op: F1 of rank 1")


def test_where_a_wait_is_unknown_all_ranks_are_looked_at():
    notes = [note(rank, None) for rank in range(3)]
    assert "which has reported no wait" in judge(*notes)
    assert "waits for rank 3, which is in f" in judge(*notes, note(3))
    assert judge(*notes, note(3, None)).startswith("no rank is missing")


def test_a_note_is_read_as_it_was_written():
    _, written = note(1, (0, 2), op="F3", done=("F2", "SF2"))
    assert Waiting.load(written.dump()) == written


@pytest.mark.parametrize(
    ("forward", "done", "op"),
    [
        (None, "", ""),
        (2, "", "F2"),  # on the first stage
        (2, "B0 SB0 F3", "F3"),  # its message has the number, others than its own count, too
        (None, "F3", "B3"),  # on the last stage
        (None, "F3 SF3 B1", "B1"),
        (None, "B1 SB1", ""),
        (-1, "SF1", ""),
    ],
)
def test_the_op_under_way_is_known_by_its_messages(forward, done, op):
    watchdog = Watchdog(0, [0])
    watchdog.forward, watchdog.done = forward, [Op.parse(one) for one in done.split()]
    assert watchdog.under_way == op


@pytest.mark.parametrize(
    ("asked", "limits", "seconds", "words"),
    [
        (180, {"torch's limit": 600}, 180, "named after 180 s; after it, torch's limit 600 s"),
        (180, {"a": 600, "b": 100}, 90, "90 s, and not 180 s: b would come first"),
        (180, {"a": 4, "b": 0}, 2, "2 s, and not 180 s: a would"),
        (0, {"a": 600}, 0, "hangs are not named"),
    ],
)
def test_a_hang_is_named_before_any_limit(asked, limits, seconds, words):
    got, line = in_front(asked, limits)
    assert got == seconds
    assert words in line


def found(body, *args, **more):
    """Where a thread is that is blocked in `body`."""
    thread = threading.Thread(target=body, args=args, daemon=True)
    thread.start()
    frames, frame = [], None
    while frame is None or not any(f.f_code is body.__code__ for f in frames):
        frames, frame = [], sys._current_frames().get(thread.ident)
        one = frame
        while one is not None:
            frames.append(one)
            one = one.f_back
    return blocked(frames, 0, **more)


def test_a_queue_of_the_users_is_named_with_its_caller():
    gate = queue.Queue()

    def next_batch():
        gate.get()

    got = found(next_batch)
    gate.put(None)
    assert got.waits == ()
    assert re.search(r"is in .*next_batch \(test_hangs.py:\d+\)", got.text)


def test_code_that_asks_a_gpu_for_a_value_may_wait_for_any_rank():
    loss = SimpleNamespace(item=time.sleep)

    def step():
        loss.item(10.0)

    assert found(step, on_gpu=True).waits is None
    assert found(step).waits == ()


def logs(folder):
    return [path.read_text() for path in sorted(folder.glob("rank*"))]


def hangs(me, folder):
    """Rank 2 waits for a message of rank 1, that for a collective, and rank 0 does not come."""
    os.dup2(os.open(folder / f"rank{me.rank}", os.O_WRONLY | os.O_CREAT), 2)
    watchdog = Watchdog(me.rank, [0, 1, 2], FailureLog.shared())
    watchdog.begins(7)
    watch = HangWatch(watchdog, me.rank, 3, 2.0)
    me.say("ready")

    def stuck():
        # Another thread looks, so that this one is always found in the same place.
        named = (lambda: all("no progress" in log for log in logs(folder)), "all name a hang")
        looks = threading.Thread(target=until, args=named)
        looks.start()
        looks.join()

    def step():
        dist.all_reduce(torch.zeros(1))

    if me.rank == 0:
        stuck()
    elif me.rank == 2:
        watchdog.done = [Op.parse("F2"), Op.parse("SF2")]
        watchdog.waits_for = Op.parse("F3"), 1, time.monotonic()
        stuck()
    step()
    watchdog.waits_for = None
    watchdog.calls += 1
    until(lambda: "goes on" in logs(folder)[me.rank], "it is logged that the rank goes on")
    watch.close()
    me.meet()


def test_all_ranks_name_the_one_that_does_not_come(tmp_path):
    with Processes(hangs, tmp_path, ranks=3) as processes:
        for rank in range(3):
            assert processes.reported(rank) == "ready"
        for rank in range(3):
            processes.result(rank)
    own = (
        r"is in .*stuck \(test_hangs.py:\d+\)",
        r"is in torch's all_reduce over ranks 0, 1, 2, called by step \(test_hangs.py:\d+\)",
        r"waits for F3 from stage 1 \(rank 1\) after SF2",
    )
    for rank, text in enumerate(logs(tmp_path)):
        line, *_ = [line for line in text.splitlines() if "no progress" in line]
        begin = rf"adaptra: stage {rank} \(rank {rank}\) on \S+: no progress in iteration 8 since "
        assert re.match(begin + rf"\d\d:\d\d:\d\d \(\d s\): it {own[rank]}", line), line
        stuck = own[0] + r", called by hangs \(test_hangs.py:\d+\)"
        late = rf"stage 0 \(rank 0\) on \S+, which {stuck}" if rank else "this rank"
        assert re.search(f"the job waits for {late}; first missing op: ", line), line
        assert line.endswith("training goes on once that moves")


def hangs_without_store(me, folder):
    os.dup2(os.open(folder / f"rank{me.rank}", os.O_WRONLY | os.O_CREAT), 2)
    watchdog = Watchdog(0, [0, 1], FailureLog.shared())
    me.say("ready")
    until(lambda: watchdog.failure_log.store.get_all(["x"]) is None, "the store is gone")
    watchdog.waits_for = Op.parse("B3"), 1, time.monotonic()
    watch = HangWatch(watchdog, 0, 2, 1.0)
    until(lambda: "no progress" in logs(folder)[0], "a hang is named")
    watch.close()


def test_without_the_store_a_rank_names_what_it_knows_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(waits, "STORE", 1.0)  # of the ranks, too
    with Processes(hangs_without_store, tmp_path, ranks=1) as processes:
        assert processes.reported(0) == "ready"
        processes.drop_store()
        processes.result(0)
    (text,) = logs(tmp_path)
    assert "it waits for B3 from stage 1 (rank 1); the job's store does not answer; " in text


FULL_DISK = """
import subprocess, sys
from megatron_adaptra.execute.hang_watch import _full_disks
disk = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], check=True)
print(disk in _full_disks())
try:
    with open(disk + "/shard", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
except OSError:
    print(disk in _full_disks())
"""


def test_a_full_disk_is_found(tmp_path):
    words = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", FULL_DISK]
    done = subprocess.run([*words, str(tmp_path)], capture_output=True, text=True, check=False)
    if done.returncode and ("unshare" in done.stderr or "'mount'" in done.stderr):
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()[-200:]}")
    assert done.stdout.split() == ["False", "True"], done.stderr
