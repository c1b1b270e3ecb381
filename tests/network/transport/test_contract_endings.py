"""How waits end: with a timeout, an abort, a close, or the death of a peer."""

import threading
import time
from itertools import pairwise

import pytest
from patience import PATIENCE
from transport.ranks import KINDS, PROCESSES, Processes, full, run, threads, until

from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.transport.gloo import open_links

every_kind = pytest.mark.parametrize("kind", KINDS)


def timed_out(rank_fixture):
    peer, words = 1 - rank_fixture.rank, []
    waits = [rank_fixture.transport.irecv(full(0), peer, 77)]
    for work in waits:
        with pytest.raises(PeerLost) as lost:
            work.wait(0.05)
        words.append(str(lost.value))
        assert not work.done()
    rank_fixture.meet()
    return words


@every_kind
def test_no_message_in_time_names_peer_and_tag(kind):
    for rank, words in enumerate(run(kind, timed_out)):
        for text in words:
            assert "0.05 s" in text
            assert "77" in text
            assert str(1 - rank) in text


def zero_timeout(rank_fixture):
    if rank_fixture.rank == 0:
        work = rank_fixture.transport.isend(full(3), 1, 1)
        rank_fixture.meet()
        until(work.done, "the message leaves")
        work.wait(60.0)  # handed over is not yet gone: the backend may need a moment
        return None
    work = rank_fixture.transport.irecv(full(0), 0, 1)
    never = rank_fixture.transport.irecv(full(0), 0, 2)
    rank_fixture.meet()
    with pytest.raises(PeerLost):
        never.wait(0.0)
    until(work.done, "the message arrives")
    return work.wait(0.0).completed > 0


@every_kind
def test_timeout_of_zero_only_looks(kind):
    assert run(kind, zero_timeout)[1]


def abort_while_waiting(rank_fixture):
    if rank_fixture.rank == 0:
        rank_fixture.meet()
        return None
    buffer, words = full(0), []
    work = rank_fixture.transport.irecv(buffer, 0, 5)

    def waits():
        try:
            work.wait(PATIENCE)
        except PeerLost as error:
            words.append(str(error))

    waiter = threading.Thread(target=waits)
    waiter.start()
    until(lambda: work.stamps.wanted > 0, "a thread waits")
    work.abort()
    waiter.join(PATIENCE)
    work.abort()
    rank_fixture.meet()
    return words, work.done()


@every_kind
def test_abort_wakes_the_waiter(kind):
    words, done = run(kind, abort_while_waiting)[1]
    assert done
    assert "aborted" in words[0]


def close_while_waiting(rank_fixture):
    """The transport is closed, twice, with receives posted on several links."""
    others = [rank for rank in range(3) if rank != rank_fixture.rank]
    works = [rank_fixture.transport.irecv(full(0), peer, tag) for peer in others for tag in (1, 2)]
    lost = []

    def waits():
        for work in works:
            with pytest.raises(PeerLost):
                work.wait(PATIENCE)
            lost.append(work)

    waiter = threading.Thread(target=waits)
    waiter.start()
    until(lambda: works[0].stamps.wanted > 0, "a thread waits")
    rank_fixture.meet()
    rank_fixture.transport.close()
    rank_fixture.transport.close()
    waiter.join(PATIENCE)
    for call in (rank_fixture.transport.isend, rank_fixture.transport.irecv):
        with pytest.raises(PeerLost, match="closed"):
            call(full(0), others[0], 9)
    return len(lost), threads()


@every_kind
def test_close_ends_waits_and_threads(kind):
    for lost, left in run(kind, close_while_waiting, ranks=3):
        assert lost == 4
        if kind == "gloo":  # threads of loopback are the network's
            assert left == []
    until(lambda: not threads(), "the threads end")


def waits_for_the_dead(rank_fixture):
    """Rank 1 is killed while rank 0 waits for its message."""
    if rank_fixture.rank == 1:
        works = [rank_fixture.transport.irecv(full(0), 0, tag) for tag in range(2)]
        works[0].wait(PATIENCE)
        rank_fixture.say("ready")
        works[1].wait(PATIENCE)
        return None
    rank_fixture.transport.isend(full(1), 1, 0).wait(PATIENCE)
    rank_fixture.say("ready")
    works = [rank_fixture.transport.irecv(full(0), 1, tag) for tag in range(3)]
    words = []
    for work in works:
        with pytest.raises(PeerLost) as lost:
            work.wait(PATIENCE)
        words.append(str(lost.value))
    for call in (rank_fixture.transport.isend, rank_fixture.transport.irecv):
        with pytest.raises(PeerLost) as lost:
            call(full(1), 1, 9).wait(PATIENCE)
        words.append(str(lost.value))
    rank_fixture.transport.close()
    return words, threads()


@pytest.mark.parametrize("kind", PROCESSES)
def test_killed_peer_is_lost_soon(kind):
    with Processes(waits_for_the_dead, kind=kind) as processes:
        assert processes.reported(0) == processes.reported(1) == "ready"
        processes.kill(1)
        killed = time.monotonic()
        words, left = processes.result(0)
        assert time.monotonic() - killed < PATIENCE / 2  # not the end of a timeout
    if kind == "gloo":  # those of the engine are the process's
        assert left == []
    for text in words:
        assert "stage 1 (rank 1): " in text
        assert "connection closed" in text


def closed_while_held(rank_fixture):
    rank_fixture.meet()  # else a close may come before the other side has connected
    if rank_fixture.rank == 1:
        rank_fixture.meet()
        return None
    works = [rank_fixture.transport.isend(full(1), 1, tag) for tag in range(3)]
    works[0].abort()
    rank_fixture.transport.close()
    for work in works:
        with pytest.raises(PeerLost, match="aborted"):
            work.wait(PATIENCE)
    rank_fixture.meet()
    return threads()


@pytest.mark.parametrize("kind", PROCESSES)
def test_close_drops_what_the_emulator_holds(kind):
    left = run(kind, closed_while_held, rules=["0>1:60s"])[0]
    assert left == [] or kind != "gloo"  # those of the engine are the process's


def abort_then_more(rank_fixture):
    """An aborted message does not take those behind it along."""
    if rank_fixture.rank == 0:
        works = [rank_fixture.transport.isend(full(tag), 1, tag) for tag in range(3)]
        works[0].abort()
        for work in works[1:]:
            work.wait(PATIENCE)
        return None
    buffers = [full(-1) for _ in range(2)]
    works = [rank_fixture.transport.irecv(buffer, 0, tag + 1) for tag, buffer in enumerate(buffers)]
    stamps = [work.wait(PATIENCE) for work in works]
    assert all(a.sent <= b.sent for a, b in pairwise(stamps))
    return [buffer.unique().tolist() for buffer in buffers]


@pytest.mark.parametrize("kind", PROCESSES)
def test_aborted_send_leaves_the_others_alone(kind):
    assert run(kind, abort_then_more, rules=["0>1:50ms"])[1] == [[1.0], [2.0]]


def connects_alone(rank_fixture):
    """Rank 1 never opens its end."""
    if rank_fixture.rank:
        rank_fixture.meet()
        return ""
    with pytest.raises(PeerLost) as error:
        open_links([0, 1], [(0, 1)], "alone", timeout=1.0)
    rank_fixture.meet()
    return str(error.value)


def test_a_rank_that_does_not_connect_is_named():
    with Processes(connects_alone) as processes:
        words = processes.result(0)
    assert words.startswith("stage 1 (rank 1): no connection of kind 'alone' after 1 s: ")
