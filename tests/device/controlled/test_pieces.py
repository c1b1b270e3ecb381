"""A large message goes in pieces: copy out, wire and copy in take place at the same time.

No test here needs a clock: copies stand still where the test says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from controlled.test_device_failures import lost
from controlled.test_messages import SHORT, every_path, is_all, memory
from fakes.controlled_cuda.gpu import Driver, Side, copies_of, run, two, until
from patience import PATIENCE
from transport.test_engine_paths import connections, cut

from megatron_adaptra.transport.engine.on_device import DeviceTransport
from megatron_adaptra.transport.engine.transport import EngineReceive, EngineSend

PIECE = 1 << 16  # bytes
SIZE = 5 * PIECE + 1000
LARGE = 1 << 20


@contextmanager
def opened(
    driver: Driver, kind: str = "shm"
) -> Iterator[tuple[Side, Side, DeviceTransport, DeviceTransport]]:
    """Two sides with transports in pieces; rank 0 sends, rank 1 receives."""
    with two(driver, kind) as (a, b):
        there, here = a.open(piece=PIECE), b.open(piece=PIECE)
        yield a, b, there, here
        there.close()
        here.close()


def arrived(got: torch.Tensor, pieces: int, value: int = 7) -> None:
    """So many pieces have been copied to the target, and nothing else."""
    last = pieces * PIECE
    until(lambda: is_all(got[:last], value), f"{pieces} pieces are in the target")
    assert is_all(got[last:], 0)


def half_out(
    driver: Driver, there: DeviceTransport, here: DeviceTransport, pieces: int = 1
) -> tuple[torch.Tensor, torch.Tensor, EngineReceive, EngineSend, Callable[[], None]]:
    """A message of which so many pieces have arrived: target, source, receive, send, and release.

    No more is copied out until the last one is called.
    """
    got, source = memory(0, SIZE), memory(7, SIZE)
    go = driver.stop_copies("out", after=pieces)
    work = here.irecv(got, 0, 1)
    send = there.isend(source, 1, 1)
    arrived(got, pieces)
    return got, source, work, send, go


@contextmanager
def blocked(call: Callable[[], object]) -> Iterator[None]:
    """`call` returns after the block, and not before."""
    over = threading.Event()
    thread = threading.Thread(target=lambda: (call(), over.set()))
    thread.start()
    assert not over.wait(SHORT)
    yield
    assert over.wait(PATIENCE)
    thread.join()


def overlapping(driver: Driver, kind: str) -> None:
    with opened(driver, kind) as (_, b, there, here):
        got, _, work, send, go = half_out(driver, there, here)
        assert not work.done()
        assert not send.done()
        go()
        stamps = work.wait(PATIENCE)
        driver.finish(b.compute)
        assert is_all(got, 7)
        assert 0 < send.wait(PATIENCE).sent <= stamps.sent <= stamps.completed
        until(lambda: copies_of(here)[1].count == 1, "it is counted")
        assert copies_of(here)[1].bytes == copies_of(there)[0].bytes == SIZE


@every_path
def test_the_first_piece_is_there_before_the_second_is_copied(kind: str) -> None:
    run(overlapping, kind)


def consumed(driver: Driver) -> None:
    with opened(driver) as (_, b, there, here):
        got, _, work, _, leave = half_out(driver, there, here)
        seen = memory(0, SIZE)
        go = driver.stop_copies("in", after=0)
        leave()
        work.wait(PATIENCE)
        driver.copy(b.compute, seen, got)  # as a kernel that reads it
        with blocked(lambda: driver.finish(b.compute)):
            go()
        assert is_all(seen, 7)


def test_what_reads_a_message_waits_for_its_last_piece() -> None:
    run(consumed)


def several(driver: Driver, kind: str) -> None:
    """Messages one behind the other, of sizes beside whole pieces; producers are late."""
    sizes = [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, SIZE, LARGE]
    with opened(driver, kind) as (a, b, there, here):
        got = [memory(0, size) for size in sizes]
        works = [here.irecv(target, 0, tag) for tag, target in enumerate(got)]
        go = driver.stop(a.compute)
        sent = [memory(0, size) for size in sizes]
        for tag, source in enumerate(sent):
            driver.fill(a.compute, source, tag + 1)
            there.isend(source, 1, tag)
        go()
        for tag, work in enumerate(works):
            work.wait(PATIENCE)
            seen = memory(0, sizes[tag])
            driver.copy(b.compute, seen, got[tag])
            driver.finish(b.compute)
            assert is_all(seen, tag + 1)


@every_path
def test_pieces_of_several_messages(kind: str) -> None:
    run(several, kind)


def not_registered(driver: Driver) -> None:
    """The engine sends from memory of its own, to which it copies each piece."""
    with opened(driver) as (a, b, there, here):
        driver.fail("cuMemHostRegister_v2", code=801)
        there.isend(memory(1, 8), 1, 5)
        until(lambda: a.staging.memory().copied != "", "it was refused")
        got, _, work, _, go = half_out(driver, there, here)
        go()
        work.wait(PATIENCE)
        driver.finish(b.compute)
        assert is_all(got, 7)


def test_pieces_of_memory_that_the_engine_copies() -> None:
    run(not_registered)


def paths_cut(driver: Driver) -> None:
    """All connections break while half of a message is out; it goes on over new ones, once."""
    with opened(driver, "tcp") as (_, b, there, here):
        got, _, work, send, go = half_out(driver, there, here, pieces=2)
        cut(connections())
        go()
        work.wait(PATIENCE)
        send.wait(PATIENCE)
        driver.finish(b.compute)
        assert is_all(got, 7)


def test_paths_that_break_with_half_of_a_message_out() -> None:
    run(paths_cut)


def aborted_between(driver: Driver) -> None:
    """A receive is given up with pieces in it: what comes later goes nowhere."""
    with opened(driver) as (_, b, there, here):
        got, _, work, send, go = half_out(driver, there, here, pieces=2)
        work.abort()
        got.fill_(3)
        assert lost(work) == "stage 0 (rank 0): aborted"
        go()
        send.wait(PATIENCE)
        again = memory(0, SIZE)
        second = here.irecv(again, 0, 1)
        there.isend(memory(8, SIZE), 1, 1)
        second.wait(PATIENCE)
        driver.finish(b.compute)
        assert is_all(again, 8)
        assert is_all(got, 3)


def test_a_receive_that_is_given_up_between_pieces() -> None:
    run(aborted_between)


def aborted_in_a_piece(driver: Driver) -> None:
    """The second piece is being copied to the target: giving it up waits for that."""
    with opened(driver) as (_, b, there, here):
        got = memory(0, SIZE)
        leave = [driver.stop_copies("out", after=after) for after in (1, 2)]
        work = here.irecv(got, 0, 1)
        send = there.isend(memory(7, SIZE), 1, 1)
        arrived(got, 1)
        go_in = driver.stop_copies("in", after=0)
        leave[0]()
        until(lambda: driver.calls("cuMemcpyHtoDAsync_v2") == 2, "the second is on its stream")
        with blocked(work.abort):
            assert is_all(got[PIECE:], 0)
            go_in()
        got.fill_(3)
        leave[1]()
        send.wait(PATIENCE)
        driver.finish(b.compute)
        assert is_all(got, 3)


def test_a_receive_that_is_given_up_in_a_piece() -> None:
    run(aborted_in_a_piece)


def given_up_send(driver: Driver, closes: bool) -> None:
    """The peer gets all of a message of which it has a part, and the sender its memory."""
    with opened(driver) as (_, b, there, here):
        got, sent, work, send, go = half_out(driver, there, here)
        with blocked(there.close if closes else send.abort):
            go()
        sent.fill_(9)
        work.wait(PATIENCE)
        driver.finish(b.compute)
        assert is_all(got, 7)


@pytest.mark.parametrize("closes", [False, True])
def test_a_send_that_is_given_up_between_pieces_arrives(closes: bool) -> None:
    run(given_up_send, closes)


def closed_receiver(driver: Driver) -> None:
    """The receiver closes with half of a message; the next transport of the name gets its own."""
    with two(driver) as (a, b):
        there, here = a.open(piece=PIECE), b.open(piece=PIECE)
        got, _, work, send, go = half_out(driver, there, here)
        here.close()
        got.fill_(3)
        assert "closed" in lost(work)
        go()
        send.wait(PATIENCE)
        there.close()
        there, here = a.open(piece=PIECE), b.open(piece=PIECE)
        again = memory(0, SIZE)
        second = here.irecv(again, 0, 1)
        there.isend(memory(8, SIZE), 1, 1)
        second.wait(PATIENCE)
        driver.finish(b.compute)
        assert is_all(again, 8)
        assert is_all(got, 3)
        there.close()
        here.close()


def test_a_receiver_that_closes_between_pieces() -> None:
    run(closed_receiver)


def sender_fails(driver: Driver) -> tuple[str, str]:
    with opened(driver) as (_, _b, there, here):
        got, _, posted, sent, go = half_out(driver, there, here)
        driver.fail("cuEventQuery", code=719)
        words = lost(sent), lost(posted)
        go()
        assert is_all(got[PIECE:], 0)
    return words


def test_a_gpu_that_fails_with_half_of_a_message_out() -> None:
    words = run(sender_fails)
    # A slow receiver may still have the event of the first piece to ask for, and then it fails.
    failed = int(" says: " in words[0])
    first, other = f"stage {1 - failed} (rank {1 - failed}): ", f"stage {failed} (rank {failed}): "
    assert words[failed].startswith(f"{first}cuEventQuery failed: ")
    assert words[1 - failed].startswith(f"{other}rank {failed} says: cuEventQuery failed: ")


def receiver_fails(driver: Driver) -> tuple[str, str]:
    with opened(driver) as (_, _b, there, here):
        got = memory(0, SIZE)
        go = driver.stop_copies("out", after=1)
        posted, back = here.irecv(got, 0, 1), there.irecv(memory(0), 1, 2)
        there.isend(memory(7, SIZE), 1, 1)
        arrived(got, 1)  # pieces that come together are one copy: the first one has to be alone
        driver.fail("cuMemcpyHtoDAsync_v2", code=719)
        go()
        words = lost(posted), lost(back)
        assert is_all(got[PIECE:], 0)
    return words


def test_a_gpu_that_fails_with_half_of_a_message_in() -> None:
    here, there = run(receiver_fails)
    assert here.startswith("stage 0 (rank 0): cuMemcpyHtoDAsync failed: ")
    assert there.startswith("stage 1 (rank 1): rank 1 says: cuMemcpyHtoDAsync failed: ")


def refused_piece(driver: Driver) -> str:
    """The driver refuses the third piece of a send; the memory is free after the first two."""
    with opened(driver) as (_, _b, there, here):
        posted = here.irecv(memory(0, SIZE), 0, 1)
        driver.fail("cuMemcpyDtoHAsync_v2", after=2, code=719)
        go = driver.stop_copies("out", after=0)
        sent = there.isend(memory(7, SIZE), 1, 1)
        words = lost(sent)
        lost(posted)
        assert not sent.handle.over()
        go()
        until(sent.handle.over, "the copies that were issued have passed")
    return words


def test_a_piece_that_the_driver_refuses() -> None:
    assert "cuMemcpyDtoHAsync failed: " in run(refused_piece)
