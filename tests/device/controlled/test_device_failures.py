"""What fails on one side fails at both; what is given up is not written to; nothing is left."""

from __future__ import annotations

import os
import threading
from unittest.mock import patch

import pytest
import torch
from controlled.test_messages import SHORT, SIZE, is_all, memory
from fakes.controlled_cuda.gpu import Driver, Side, run, two, until
from patience import PATIENCE
from seeding import new_seed

from megatron_adaptra.base.errors import DeviceFailed, PeerLost
from megatron_adaptra.device import staging

LATE = 0.02  # seconds by which streams are late, at most


def lost(work: object) -> str:
    with pytest.raises(PeerLost) as error:
        work.wait(PATIENCE)  # type: ignore[attr-defined]
    return str(error.value)


def failing(driver: Driver, call: str, code: int, seed: int = 0) -> list[str]:
    """A call of rank 0's driver fails while it sends: what both ranks raise, now and later.

    With a `seed` streams are late by chance.
    """
    if seed:
        driver.late(seed, LATE)
    with two(driver) as (a, b):
        there, here = a.open(), b.open()
        posted = here.irecv(memory(0), 0, 1)
        behind, back = here.irecv(memory(0), 0, 2), there.irecv(memory(0), 1, 3)
        until(lambda: b.staging.memory().used >= 2 * SIZE, "both of rank 1 have memory")
        until(lambda: a.staging.memory().used >= SIZE, "so has that of rank 0")
        driver.fail(call, code=code)
        source = memory(1)  # it stays: this driver copies also what nobody waits for
        sent = there.isend(source, 1, 1)
        words = [lost(sent), lost(posted)]
        driver.heal()
        words += [lost(behind), lost(back)]
        words.append(lost(there.isend(memory(1), 1, 2)))
        words.append(lost(here.isend(memory(1), 0, 3)))
        there.close()
        here.close()
    return words


CALLS = [("cuMemcpyDtoHAsync_v2", 719), ("cuEventQuery", 719), ("cuStreamWaitEvent", 719)]


@pytest.mark.long
@pytest.mark.parametrize(("call", "code"), CALLS)
def test_an_error_reaches_both_sides(call: str, code: int) -> None:
    reaches_both(call, code, 0)


@pytest.mark.long
@pytest.mark.parametrize(("call", "code"), CALLS)
def test_an_error_reaches_both_sides_however_late_streams_are(call: str, code: int) -> None:
    for _ in range(5):
        reaches_both(call, code, new_seed() % (1 << 30) + 1)


def reaches_both(call: str, code: int, seed: int) -> None:
    here, there, *later = run(failing, call, code, seed)
    what = f"{call.removesuffix('_v2')} failed: CUDA_ERROR_"
    for words in (here, there, *later):
        assert what in words
        assert f"({code}, " in words
        assert "on GPU 0; " in words
    assert here.startswith("stage 1 (rank 1): ")
    assert "rank 0 says" not in here
    assert there.startswith("stage 0 (rank 0): rank 0 says: ")
    for n, words in enumerate(later):
        assert ("rank 0 says: " in words) == (n in (0, 3))


def copy_late(driver: Driver) -> str:
    """The question fails while the copy has not begun: its events serve the next send, and pass."""
    with two(driver) as (a, b):
        there, here = a.open(), b.open()
        source = memory(1)  # it stays: this driver copies also what nobody waits for
        go = driver.stop(a.compute)
        driver.fail("cuEventQuery", code=719)
        words = lost(there.isend(source, 1, 1))
        a.compute = driver.stream()  # the old one still holds up the copies
        again = there.isend(memory(1), 1, 2)
        assert lost(again) == words
        driver.finish(a.compute)
        assert not again.handle.over()
        go()
        until(again.handle.over, "its copy has passed")
        there.close()
        here.close()
    return words


def test_events_of_a_send_that_failed_serve_again() -> None:
    assert "cuEventQuery failed: CUDA_ERROR_OTHER (719, " in run(copy_late)


def receiver_fails(driver: Driver) -> tuple[str, str]:
    with two(driver) as (a, b):
        there, here = a.open(), b.open()
        posted = here.irecv(memory(0), 0, 1)
        driver.fail("cuMemcpyHtoDAsync_v2", code=719)  # the other GPU's driver goes on
        there.isend(memory(1), 1, 1)
        words = lost(posted), lost(there.irecv(memory(0), 1, 2))
        there.close()
        here.close()
    return words


def test_an_error_of_the_receiver_reaches_the_sender() -> None:
    here, there = run(receiver_fails)
    assert here.startswith("stage 0 (rank 0): cuMemcpyHtoDAsync failed: ")
    assert there.startswith("stage 1 (rank 1): rank 1 says: cuMemcpyHtoDAsync failed: ")
    assert "CUDA_LAUNCH_BLOCKING=1" in there


def call_refused(driver: Driver) -> None:
    with two(driver) as (a, b):
        there, here = a.open(), b.open()
        driver.capture(a.compute, True)
        for call in (there.isend, there.irecv):
            with pytest.raises(DeviceFailed, match="captured into a graph"):
                call(memory(1), 1, 1)
        driver.capture(a.compute, False)
        driver.fail("cuEventRecord", code=2)
        with pytest.raises(DeviceFailed, match=r"message 1 to stage 1 \(rank 1\): cuEventRecord"):
            there.isend(memory(1), 1, 1)
        there.close()
        here.close()


def test_what_the_driver_refuses_at_once_is_raised() -> None:
    run(call_refused)


def aborted_early(driver: Driver) -> None:
    """A receive that is given up before its message came: what comes later goes nowhere."""
    with two(driver) as (a, b):
        there, here = a.open(), b.open()
        first, second = memory(3), memory(0)
        given_up, kept = here.irecv(first, 0, 1), here.irecv(second, 0, 2)
        until(lambda: b.staging.memory().used >= 2 * SIZE, "both are posted")
        given_up.abort()
        given_up.abort()
        assert given_up.done()
        assert lost(given_up) == "stage 0 (rank 0): aborted"
        third = memory(0)
        again = here.irecv(third, 0, 1)  # and gets the message in its place
        sends = [there.isend(memory(tag), 1, tag) for tag in (1, 2)]
        again.wait(PATIENCE)
        kept.wait(PATIENCE)
        driver.finish(b.compute)
        assert is_all(first, 3)
        assert is_all(second, 2)
        assert is_all(third, 1)
        sends[1].wait(PATIENCE)
        there.close()
        here.close()


def test_an_aborted_receive_is_not_written_to() -> None:
    run(aborted_early)


def aborted_late(driver: Driver) -> None:
    """The copy is issued, but what had the memory before is not over: the abort waits for both."""
    with two(driver) as (a, b):
        there, here = a.open(), b.open()
        got = memory(3)
        go = driver.stop(b.compute)
        work = here.irecv(got, 0, 1)
        there.isend(memory(7), 1, 1)
        work.wait(PATIENCE)
        over = threading.Event()
        giving_up = threading.Thread(target=lambda: (work.abort(), over.set()))
        giving_up.start()
        assert not over.wait(SHORT)
        assert is_all(got, 3)
        go()
        assert over.wait(PATIENCE)
        assert is_all(got, 7)  # nothing comes after the abort has returned
        giving_up.join()
        there.close()
        here.close()


def test_an_abort_waits_for_a_copy_that_is_issued() -> None:
    run(aborted_late)


def aborted_send(driver: Driver) -> None:
    with two(driver) as (a, b):
        there, here = a.open(), b.open()
        works = [here.irecv(memory(0), 0, tag) for tag in (1, 2)]
        go = driver.stop(a.compute)
        sends = [there.isend(memory(7), 1, tag) for tag in (1, 2)]
        giving_up = threading.Thread(target=sends[0].abort)
        giving_up.start()
        assert lost(sends[0]) == "stage 1 (rank 1): aborted"
        go()
        giving_up.join(PATIENCE)
        works[1].wait(PATIENCE)
        assert not works[0].done()
        there.close()
        here.close()


def test_an_aborted_send_leaves_the_others_alone() -> None:
    run(aborted_send)


def closed_under_way(driver: Driver) -> None:
    """Copies that the GPU has begun are waited for; all who wait get PeerLost."""
    with two(driver) as (a, b):
        there, here = a.open(), b.open()
        posted = here.irecv(memory(0), 0, 1)
        go = driver.stop(a.compute)
        sent = there.isend(memory(7), 1, 1)
        closing = threading.Thread(target=there.close)
        closing.start()
        assert "aborted: this side has closed the transport" in lost(sent)
        assert there.close in a.device.users
        go()
        closing.join(PATIENCE)
        assert there.close not in a.device.users
        a.endpoint.close()
        assert lost(posted).startswith("stage 0 (rank 0): ")
        here.close()


def test_close_waits_for_copies() -> None:
    run(closed_under_way)


def opened_again(driver: Driver) -> None:
    """As when a link gets slow again: a transport of the same name."""
    with two(driver) as (a, b):
        for value in range(1, 4):
            there, here = a.open(), b.open()
            got = memory(0)
            never = here.irecv(memory(0), 0, 2)
            work = here.irecv(got, 0, 1)
            there.isend(memory(value), 1, 1).wait(PATIENCE)
            work.wait(PATIENCE)
            driver.finish(b.compute)
            assert is_all(got, value)
            there.close()
            here.close()
            assert "closed" in lost(never)
        there, here = a.open(), b.open()
        work = here.irecv(memory(0), 0, 1)
        driver.fail("cuMemcpyDtoHAsync_v2", code=719)
        there.isend(memory(1), 1, 1)
        assert "rank 0 says" in lost(work), "errors reach the transport that is open now"
        there.close()
        here.close()


def test_a_transport_opens_again() -> None:
    run(opened_again)


def exchange(sides: tuple[Side, Side], count: int, size: int) -> None:
    there, here = (side.open() for side in sides)
    works = [here.irecv(memory(0, size), 0, tag) for tag in range(count)]
    sends = [there.isend(memory(1, size), 1, tag) for tag in range(count)]
    for work in works + sends:
        work.wait(PATIENCE)
    there.close()
    here.close()


def shrinking(driver: Driver, registers: bool) -> None:
    pages = (SIZE + 4095) // 4096 * 4096
    with two(driver) as sides:
        if not registers:
            for _ in sides:
                driver.fail("cuMemHostRegister_v2", code=801)
                sides[0].staging.memory()
        exchange(sides, 8, SIZE)
        b = sides[1]
        until(lambda: b.staging.memory().used == 0, "all copies have passed")
        most = b.staging.memory()
        assert pages <= most.held == most.peak <= 8 * pages
        assert most.held % pages == 0, "sizes are not rounded to powers of two"
        assert most.over == 0
        b.staging.trim()  # all of it was used since the start
        b.staging.trim()
        until(lambda: b.staging.memory().held == 0, "what is not used is given back")
        assert b.staging.memory().peak == most.peak
        b.staging.new_peak()
        b.staging.pinned.set_limit(pages)
        exchange(sides, 3, SIZE)
        until(lambda: b.staging.memory().used == 0, "all copies have passed")
        exchange(sides, 1, 3 * SIZE)  # of another size: what is idle makes room
        limited = b.staging.memory()
        assert limited.held == (3 * SIZE + 4095) // 4096 * 4096, "what was idle has gone"
        assert limited.over == limited.peak - pages > 0
        b.staging.trim(all=True)
        until(lambda: b.staging.memory().held == 0, "all is given back")


@pytest.mark.parametrize("registers", [True, False])
def test_pinned_memory_shrinks(registers: bool) -> None:
    run(shrinking, registers)


def prepared(driver: Driver) -> None:
    with two(driver) as sides:
        for side in sides:
            side.staging.prepare(SIZE, 4)
            until(lambda side=side: side.staging.memory().held > 0, "it is pinned")
        until(lambda: all(s.staging.memory().used == 0 for s in sides), "it is given back")
        held = [side.staging.memory().held for side in sides]
        exchange(sides, 4, SIZE)
        assert [side.staging.memory().held for side in sides] == held, "nothing more was needed"


def test_memory_can_be_pinned_beforehand() -> None:
    run(prepared)


def copied_memory(driver: Driver) -> str:
    """The driver does not pin the engine's memory: it gives its own, which the engine copies."""
    with two(driver) as sides:
        for side in sides:
            driver.fail("cuMemHostRegister_v2", code=801)
            transport = side.open("other")
            transport.isend(memory(1), 1 - side.rank, 1)
            until(lambda side=side: side.staging.memory().copied != "", "it was refused")
            transport.close()
        exchange(sides, 4, SIZE)
        assert driver.calls("cuMemHostAlloc") > 0
        lines: list[str] = []
        with patch.object(staging, "log_line", lines.append):
            for _ in range(3):
                sides[0].staging.trim()
        (line,) = lines
        return line


def test_memory_of_the_driver_serves_as_well() -> None:
    words = run(copied_memory)
    assert "cuda:0: messages go through memory of the driver, from where the engine copies" in words
    assert "cuMemHostRegister says CUDA_ERROR_OTHER (801, some error)" in words


def forked(driver: Driver) -> str:
    with two(driver) as sides:
        transports = [side.open() for side in sides]
        mark = sides[0].device.mark()
        readable, writable = os.pipe()
        if (child := os.fork()) == 0:
            words = []
            for call in (sides[0].device.mark, lambda: transports[0].isend(memory(1), 1, 1)):
                try:
                    call()
                except DeviceFailed as error:
                    words.append(str(error))
            words.append(mark.fault if mark.at() is None else "read")
            sides[0].device.close()
            os.write(writable, "|".join(words).encode())
            os._exit(0)
        os.waitpid(child, 0)
        words = os.read(readable, 10_000).decode()
        exchange_over(transports)
        for transport in transports:
            transport.close()
    return words


def exchange_over(transports: list) -> None:
    work = transports[1].irecv(torch.zeros(8), 0, 1)
    transports[0].isend(torch.ones(8), 1, 1).wait(PATIENCE)
    work.wait(PATIENCE)


def test_a_forked_child_leaves_the_gpu_alone() -> None:
    words = run(forked).split("|")
    assert len(words) == 3
    assert all("is a child of it" in text for text in words)
