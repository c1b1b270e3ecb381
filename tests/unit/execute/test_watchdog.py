"""Last words: who waited for whom, and processes that end when they should."""

import ctypes
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from transport.ranks import Processes, until

from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.execute.failure_log import FailureLog
from megatron_adaptra.execute.process_location import ProcessLocation, visible_pids
from megatron_adaptra.execute.watchdog import Watchdog
from megatron_adaptra.ir.op import Op


class Dead(FailureLog):
    def missing(self):
        return {"died": [6]}


def test_loss_names_stage_rank_op_and_peer():
    failure_log = FailureLog()
    watchdog = Watchdog(1, [4, 5, 6], failure_log)
    watchdog.waits_for = Op.parse("B3"), 2, time.monotonic()
    error = PeerLost("stage 2 (rank 6): its connection closed")
    words = str(watchdog.lost(Op.parse("B3"), 2, error))
    pattern = r"stage 1 \(rank 5\) waited \d+\.\d s for B3 from stage 2 \(rank 6\): its connection"
    assert re.match(pattern + " closed$", words)
    assert failure_log.read() == words


def test_send_goes_to_its_peer():
    watchdog = Watchdog(0, [0, 1])
    watchdog.waits_for = Op.parse("SF3"), 1, time.monotonic()
    assert "for SF3 to stage 1 (rank 1)" in watchdog.describe()


def test_wait_that_went_well_is_forgotten():
    watchdog = Watchdog(0, [0, 1])
    watchdog.waits_for = Op.parse("F3"), 1, time.monotonic()
    watchdog.waits_for = None
    watchdog.phase = "the optimizer step"
    assert watchdog.describe() == "stage 0 (rank 0) was in the optimizer step"


def test_first_to_notice_is_repeated_by_the_others():
    failure_log = Dead()
    first, second = Watchdog(1, [4, 5, 6], failure_log), Watchdog(0, [4, 5, 6], failure_log)
    first.phase = second.phase = "iteration 8"
    words = first.describe()
    assert words == "stage 1 (rank 5) was in iteration 8; died: rank 6"
    assert second.describe() == (f"stage 0 (rank 4) was in iteration 8; first noticed: {words}")


def blocked(me, path, block):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
    watchdog = Watchdog(1, [4, 5, 6])
    watchdog.end_on_signal()
    watchdog.waits_for = Op.parse("F3"), 0, time.monotonic()
    libc, (read, _) = ctypes.CDLL(None), os.pipe()
    names = {"libc": libc, "os": os, "read": read, "byte": ctypes.create_string_buffer(1)}
    me.say(os.getpid())
    while True:
        exec(block, names)


@pytest.mark.parametrize(
    "block",
    [
        "libc.sleep(600)",  # in C, lets Python go on
        "libc.read(read, byte, 1)",
        "os.read(read, 1)",  # Python would run a handler only after it
        "pass",  # busy in Python
    ],
)
def test_sigterm_ends_a_blocked_process_with_a_line(block, tmp_path):
    path = tmp_path / "stderr"
    with Processes(blocked, str(path), block, ranks=1) as processes:
        os.kill(processes.reported(0), signal.SIGTERM)
        assert processes.ended(0) == 128 + signal.SIGTERM
    words = path.read_text()
    pattern = r"adaptra: ended by signal 15: stage 1 \(rank 5\) waited .* for F3 from stage 0"
    assert re.match(pattern, words)
    assert words.count("\n") == 1


def test_the_signal_is_given_back_and_a_handler_of_the_users_keeps_it():
    taken = []
    give_back = Watchdog(0, [0]).end_on_signal(signal.SIGUSR1)
    assert callable(signal.getsignal(signal.SIGUSR1))
    give_back()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
    for before in (True, False):  # the user's handler is there first, or comes after ours
        try:
            if before:
                signal.signal(signal.SIGUSR1, lambda signum, _: taken.append(signum))
            give_back = Watchdog(0, [0]).end_on_signal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, lambda signum, _: taken.append(signum))
            signal.raise_signal(signal.SIGUSR1)
            give_back()
            signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert taken == 4 * [signal.SIGUSR1]


def blocked_in_gloo(me, path):
    """Rank 0 waits in gloo itself, with the interpreter's main thread."""
    if me.rank == 0:
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
        watchdog = Watchdog(0, [0, 1])
        watchdog.end_on_signal()
        watchdog.waits_for = Op.parse("B0"), 1, time.monotonic()
        work = dist.irecv(torch.zeros(4), 1)
        me.say(os.getpid())
        work.wait()
    me.meet()


def test_sigterm_ends_a_process_that_gloo_holds(tmp_path):
    path = tmp_path / "stderr"
    with Processes(blocked_in_gloo, str(path)) as processes:
        os.kill(processes.reported(0), signal.SIGTERM)
        assert processes.ended(0) == 128 + signal.SIGTERM
    assert "for B0 from stage 1 (rank 1)" in path.read_text()


def notes(me):
    failure_log = FailureLog.shared()
    before = failure_log.read(), failure_log.missing()
    me.meet()
    failure_log.write(f"rank {me.rank} was first")
    me.meet()
    words = failure_log.read()
    failure_log.write("too late")
    return before, words, failure_log.read()


def test_first_word_stays_for_all():
    with Processes(notes, ranks=3) as processes:
        results = [processes.result(rank) for rank in range(3)]
    for before, words, later in results:
        assert before == ("", {})
        assert re.fullmatch("rank [012] was first", words)
        assert words == later == results[0][1]


def sees_who_is_missing(me):
    """Ranks 0 and 1 are on one machine, 2 is on another."""
    failure_log = FailureLog.shared()
    locations = [None] * 3
    dist.all_gather_object(
        locations, ProcessLocation.here()._replace(kernel="elsewhere" * (me.rank > 1))
    )
    failure_log.connected(0, visible_pids(locations, me.rank))
    me.say(os.getpid())
    if me.rank:
        time.sleep(PATIENCE)
    until(lambda: failure_log.missing() != {}, "a peer is missing")
    watchdog = Watchdog(0, [0, 1, 2], failure_log)
    return failure_log.missing(), watchdog.describe()


@pytest.mark.parametrize(
    ("signum", "what"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "stopped")]
)
def test_a_process_that_is_gone_or_stopped_is_named(signum, what):
    with Processes(sees_who_is_missing, ranks=3) as processes:
        pids = [processes.reported(rank) for rank in range(3)]
        os.kill(pids[2], signum)
        os.kill(pids[1], signum)
        missing, words = processes.result(0)
        for pid in pids[1:] if signum == signal.SIGSTOP else []:
            os.kill(pid, signal.SIGKILL)
    assert missing == {what: [1]}
    assert words == f"stage 0 (rank 0) was in start-up; {what}: rank 1"


def waits_in_a_row(me):
    """Rank 3 waits for 2, that for 1, that for 0, which hangs; the farthest gives up first.

    As in a pipeline whose first stage hangs: the others began to wait earlier the later they are.
    """
    failure_log = FailureLog.shared()
    watchdog = Watchdog(me.rank, [0, 1, 2, 3], failure_log)
    if me.rank == 0:
        me.meet()  # it hangs, for its neighbours
        return ""
    if me.rank < 3:
        behind = f"0/waits/{me.rank + 1}"
        until(lambda: failure_log.store.get(behind) is not None, "the one behind gives up")
    waits.CHAIN = PATIENCE
    waited = 4.0 if me.rank == 1 else 2.0 * PATIENCE
    watchdog.waits_for = (
        Op.parse(f"F{me.rank}"),
        me.rank - 1,
        time.monotonic() - waited,
    )
    words = watchdog.lost(Op.parse("F0"), me.rank - 1, PeerLost("peer: timed out"))
    me.meet()
    return str(words)


def test_all_name_the_end_of_a_row_of_waits_in_any_order_of_timeouts():
    with Processes(waits_in_a_row, ranks=4) as processes:
        _, *words = (processes.result(rank) for rank in range(4))
    culprit = r"stage 1 \(rank 1\) waited \d\.\d s for F1 from stage 0 \(rank 0\): timed out"
    assert re.fullmatch(culprit, words[0])
    for rank in (2, 3):
        own = rf"stage {rank} \(rank {rank}\) waited \d+\.\d s for F{rank} from .*: timed out"
        assert re.fullmatch(rf"{own}; first noticed: {culprit}", words[rank - 1])


def outlives_the_store(me):
    failure_log = FailureLog.shared()
    me.say("ready")
    until(lambda: not _reaches_store(), "the store is gone")
    failure_log.write("something")
    return failure_log.read(), failure_log.missing()


def _reaches_store() -> bool:
    try:
        dist.distributed_c10d._get_default_store().check(["x"])
    except RuntimeError:
        return False
    return True


@pytest.mark.long
def test_the_failure_log_outlives_its_store(monkeypatch):
    monkeypatch.setattr(waits, "STORE", 1.0)  # of the ranks, too
    with Processes(outlives_the_store, ranks=1) as processes:
        assert processes.reported(0) == "ready"
        processes.drop_store()
        assert processes.result(0) == ("something", {})
