"""Memory that cannot be pinned costs time, and ends no training."""

from __future__ import annotations

from unittest.mock import patch

from controlled.test_device_failures import lost
from controlled.test_messages import SIZE, every_path, is_all, memory
from controlled.test_pieces import blocked
from fakes.controlled_cuda.gpu import Driver, Side, run, two, until
from patience import PATIENCE

from megatron_adaptra.device import staging

OUT_OF_MEMORY, NOT_PERMITTED = 2, 800
PIECE = 1 << 16  # bytes


def exchange(driver: Driver, sides: tuple[Side, Side], size: int) -> None:
    """Messages both ways, whole and in pieces, which come as they were sent."""
    transports = [side.open(piece=PIECE) for side in sides]
    for tag in range(3):
        got = [memory(0, size) for _ in sides]
        works = [transports[i].irecv(got[i], 1 - i, tag) for i in (0, 1)]
        sent = [memory(10 * tag + i + 1, size) for i in (0, 1)]
        sends = [transports[i].isend(sent[i], 1 - i, tag) for i in (0, 1)]
        for i, side in enumerate(sides):
            works[i].wait(PATIENCE)
            driver.finish(side.compute)
            assert is_all(got[i], 10 * tag + 2 - i)
        for send in sends:
            send.wait(PATIENCE)
    for transport in transports:
        transport.close()


def logged(side: Side) -> list[str]:
    """What some iterations' ends log."""
    lines: list[str] = []
    with patch.object(staging, "log_line", lines.append):
        for _ in range(3):
            side.staging.trim()
    return lines


def never(driver: Driver, kind: str, code: int) -> list[str]:
    with two(driver, kind) as sides:
        driver.refuse_pinning(code)
        for size in (8, SIZE, 5 * PIECE + 1000):
            exchange(driver, sides, size)
        for side in sides:
            until(lambda side=side: side.staging.memory().used == 0, "all copies have passed")
            assert side.staging.memory().held == 0, "such memory is not kept"
        assert driver.left()["pinned"] == 0
        return logged(sides[0])


@every_path
def test_a_driver_without_memory_to_pin_ends_no_message(kind: str) -> None:
    (line,) = run(never, kind, OUT_OF_MEMORY)
    assert line.startswith(
        "cuda:0: messages go through memory that is not pinned, which takes longer: cuMemHost"
    )
    assert "failed: CUDA_ERROR_OUT_OF_MEMORY (2, " in line
    assert "`ulimit -l` should say unlimited" in line


def test_a_driver_that_may_not_pin_ends_no_message() -> None:
    copied, unpinned = run(never, "shm", NOT_PERMITTED)
    assert "cuMemHostRegister says CUDA_ERROR_OTHER (800" in copied
    assert "cuMemHostAlloc failed: CUDA_ERROR_OTHER (800" in unpinned


def again(driver: Driver) -> None:
    """Memory is back: the next iteration has it pinned."""
    with two(driver) as sides:
        driver.refuse_pinning(OUT_OF_MEMORY)
        exchange(driver, sides, SIZE)
        asked = driver.calls("cuMemHostRegister_v2")
        exchange(driver, sides, SIZE)
        assert driver.calls("cuMemHostRegister_v2") == asked, "once in an iteration is enough"
        driver.refuse_pinning(0)
        for side in sides:
            side.staging.trim()
        for side in sides:
            side.staging.prepare(SIZE, 1)
            until(lambda side=side: side.staging.memory().held > 0, "it is pinned")
        exchange(driver, sides, SIZE)
        assert driver.left()["pinned"] > 0


def test_memory_is_pinned_again_in_the_next_iteration() -> None:
    run(again)


def room(driver: Driver) -> None:
    """What is idle is given back before other memory serves."""
    with two(driver) as sides:
        exchange(driver, sides, SIZE)
        a = sides[0]
        until(lambda: a.staging.memory().used == 0, "all copies have passed")
        idle = a.staging.memory().held
        assert idle > 0
        driver.fail("cuMemHostRegister_v2", code=OUT_OF_MEMORY)
        a.staging.prepare(4 * SIZE, 1)
        until(lambda: a.staging.memory().held >= 4 * SIZE, "it is pinned")
        found = a.staging.memory()
        assert found.held < 4 * SIZE + idle
        assert (found.copied, found.unpinned) == ("", "")


def test_idle_memory_makes_room_first() -> None:
    run(room)


def late_target(driver: Driver) -> None:
    """A copy to a target that is still in use blocks its call, and no other message."""
    with two(driver) as (a, b):
        driver.refuse_pinning(OUT_OF_MEMORY)
        there, here = a.open(), b.open()
        got, given_up, back = memory(0), memory(3), memory(0)
        go = driver.stop(b.compute)
        work, other = here.irecv(got, 0, 1), here.irecv(given_up, 0, 2)
        b.compute = driver.stream()
        there.isend(memory(7), 1, 1).wait(PATIENCE)
        until(lambda: driver.calls("cuMemcpyHtoDAsync_v2") == 1, "the first one is on its stream")
        there.isend(memory(7), 1, 2).wait(PATIENCE)
        returned = there.irecv(back, 1, 3)
        here.isend(memory(5), 0, 3)
        returned.wait(PATIENCE)
        driver.finish(a.compute)
        assert is_all(back, 5)
        assert not work.done()
        with blocked(other.abort):
            assert lost(other) == "stage 0 (rank 0): aborted"
            go()
        work.wait(PATIENCE)
        driver.finish(b.compute)
        assert is_all(got, 7)
        assert is_all(given_up, 3), "its copy had not begun"
        there.close()
        here.close()


def test_a_copy_that_waits_for_its_target_holds_up_no_other_message() -> None:
    run(late_target)


def under_way(driver: Driver) -> None:
    with two(driver) as (a, b):
        driver.refuse_pinning(OUT_OF_MEMORY)
        there, here = a.open(), b.open()
        got = memory(3)
        go = driver.stop(b.compute)
        work = here.irecv(got, 0, 1)
        there.isend(memory(7), 1, 1)
        until(lambda: driver.calls("cuMemcpyHtoDAsync_v2") == 1, "it is on its stream")
        with blocked(work.abort):
            assert lost(work) == "stage 0 (rank 0): aborted"
            assert is_all(got, 3)
            go()
        assert is_all(got, 7)  # nothing comes after the abort has returned
        there.close()
        here.close()


def test_a_copy_that_is_under_way_is_waited_for() -> None:
    run(under_way)


def in_turn(driver: Driver) -> None:
    with two(driver) as (a, b):
        driver.refuse_pinning(OUT_OF_MEMORY)  # so that a copy blocks who asks for it
        there, here = a.open(piece=PIECE), b.open(piece=PIECE)
        sent, got = [memory(1), memory(2)], [memory(0), memory(0)]
        works = [here.irecv(got[i], 0, i) for i in (0, 1)]
        go = driver.stop_copies("out", after=0)
        with blocked(lambda: there.isend(sent[0], 1, 0)):
            with blocked(lambda: there.isend(sent[1], 1, 1)):
                copies = driver.calls("cuMemcpyDtoHAsync_v2")
                go()
        assert copies == 1, "the second message stands between pieces of the first one"
        for work in works:
            work.wait(PATIENCE)
        there.close()
        here.close()


def test_pieces_of_two_threads_messages_stand_one_message_behind_the_other() -> None:
    run(in_turn)
