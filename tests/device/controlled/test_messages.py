"""Messages from one GPU's memory to another's: order, memory, errors, and what is left."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import pytest
import torch
from fakes.controlled_cuda.gpu import Driver, copies_of, run, two, until
from patience import PATIENCE, in_time

from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.device import cuda
from megatron_adaptra.transport.engine.engine_wire import EngineWire

SIZE = 300_000  # bytes
SHORT = 0.05  # seconds
COPY = 0.1  # seconds
every_path = pytest.mark.parametrize("kind", ["shm", "tcp"])


def memory(value: int, size: int = SIZE) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def is_all(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor == value).all())


def pins(driver: Driver) -> None:
    with two(driver) as (a, b):
        there, here = a.open(), b.open()
        first = here.irecv(memory(0), 0, 1)
        sent = memory(1)
        until(lambda: b.staging.memory().used >= SIZE, "the receive has memory")
        a.staging.prepare(SIZE, 1)
        until(lambda: a.staging.memory().held >= SIZE, "the send's is there")
        go = driver.stop_pinning()
        second = here.irecv(memory(0), 0, 2)
        b.staging.prepare(SIZE, 3)
        sends = [there.isend(sent, 1, 1)]
        first.wait(PATIENCE)
        sends[0].wait(PATIENCE)
        assert not second.done()
        go()
        sends.append(there.isend(sent, 1, 2))
        second.wait(PATIENCE)
        sends[1].wait(PATIENCE)
        there.close()
        here.close()


def test_a_driver_that_waits_before_it_pins_holds_up_no_other_message() -> None:
    """What the GPU has to end first may wait for a peer, who waits for that message."""
    run(pins)


def both_ways(driver: Driver, kind: str) -> None:
    with two(driver, kind) as sides:
        transports = [side.open() for side in sides]
        for tag in range(20):
            got = [memory(0) for _ in sides]
            receives = [transports[i].irecv(got[i], 1 - i, tag) for i in (0, 1)]
            sent = [memory(0) for _ in sides]
            for i, side in enumerate(sides):
                driver.fill(side.compute, sent[i], 10 * tag + i)
            sends = []
            for i in (0, 1):
                sends.append(transports[i].isend(sent[i], 1 - i, tag))
                # Put there later, its copy could stand behind a kernel that waits for the peer.
                assert driver.calls("cuMemcpyDtoHAsync_v2") == 2 * tag + i + 1
            for i, side in enumerate(sides):
                seen = memory(0)
                receives[i].wait(PATIENCE)
                driver.copy(side.compute, seen, got[i])  # as a kernel that reads it
                driver.finish(side.compute)
                assert is_all(seen, 10 * tag + 1 - i)
            for send in sends:
                stamps = send.wait(PATIENCE)
                assert 0 < stamps.sent <= stamps.completed
        for transport in transports:
            until(lambda one=transport: copies_of(one)[1].count == 20, "all copies are counted")
            out, back = copies_of(transport)
            assert (out.count, out.bytes) == (back.count, back.bytes) == (20, 20 * SIZE)
            transport.close()
            transport.close()


@every_path
def test_messages_both_ways(kind: str) -> None:
    run(both_ways, kind)


def nothing_waits(driver: Driver) -> None:
    """A receive that never comes is not on any stream: the device can always be finished."""
    with two(driver) as sides:
        transports = [side.open() for side in sides]
        work = transports[0].irecv(memory(0), 1, 5)
        with pytest.raises(PeerLost, match=r"waited 0.05 s for message 5 from stage 1"):
            work.wait(SHORT)
        driver.finish(sides[0].compute)
        assert driver.calls("cuStreamWaitEvent") == 0
        for transport in transports:
            transport.close()
        with pytest.raises(PeerLost, match="closed"):
            work.wait(PATIENCE)
        with pytest.raises(PeerLost, match="closed"):
            transports[0].isend(memory(0), 1, 5)


def test_a_posted_receive_is_on_no_stream() -> None:
    run(nothing_waits)


def late_producer(driver: Driver) -> None:
    """A send returns at once, and leaves when its producer has ended: that is `sent`."""
    with two(driver) as (a, b):
        there, here = a.open(), b.open()
        sent, got, seen = memory(0), memory(0), memory(0)
        work = here.irecv(got, 0, 1)
        go = driver.stop(a.compute)
        driver.fill(a.compute, sent, 7)
        send = there.isend(sent, 1, 1)
        assert not send.done()
        with pytest.raises(PeerLost, match="waited"):
            work.wait(SHORT)
        gone = time.monotonic()
        go()
        stamps = work.wait(PATIENCE)
        driver.copy(b.compute, seen, got)
        driver.finish(b.compute)
        assert is_all(seen, 7)
        assert gone < stamps.sent <= stamps.completed
        assert stamps.posted < gone
        assert stamps.delay < stamps.completed - stamps.posted - SHORT / 2
        assert gone < send.wait(PATIENCE).sent <= stamps.sent
        there.close()
        here.close()


def test_a_message_leaves_when_its_producer_has_ended() -> None:
    run(late_producer)


def busy_consumer(driver: Driver) -> None:
    """What had the target's memory before comes first, and does not hold up the host."""
    with two(driver) as (a, b):
        there, here = a.open(), b.open()
        got, seen, before = memory(1), memory(0), memory(0)
        go = driver.stop(b.compute)
        driver.copy(b.compute, before, got)  # still reads what was there
        work = here.irecv(got, 0, 1)
        there.isend(memory(7), 1, 1)
        work.wait(PATIENCE)  # although the copy cannot run yet
        driver.copy(b.compute, seen, got)
        other = memory(0)  # what comes meanwhile has host memory of its own
        more = here.irecv(other, 0, 2)
        there.isend(memory(8), 1, 2)
        more.wait(PATIENCE)
        assert is_all(got, 1)
        go()
        driver.finish(b.compute)
        assert is_all(before, 1)
        assert is_all(seen, 7)
        assert is_all(other, 8)
        there.close()
        here.close()


def test_the_copy_comes_after_the_last_owner_of_its_target() -> None:
    run(busy_consumer)


def kept_memory(driver: Driver) -> None:
    """A tensor that was sent may be emptied, as Megatron does: its memory stays."""
    with two(driver) as (a, b):
        there, here = a.open(), b.open()
        got = memory(0)
        work = here.irecv(got, 0, 1)
        go = driver.stop(a.compute)
        sent = memory(7)
        address = sent.data_ptr()
        there.isend(sent, 1, 1)
        sent.data = torch.empty(1, dtype=torch.uint8)
        held = [tensor for _, tensor in there._under_way]
        assert [tensor.data_ptr() for tensor in held] == [address]
        go()
        work.wait(PATIENCE)
        driver.finish(b.compute)
        assert is_all(got, 7)
        there.sweep()
        assert there._under_way == []
        there.close()
        here.close()


def test_memory_of_a_send_stays_until_it_is_copied() -> None:
    run(kept_memory)


def odd_sizes(driver: Driver, kind: str) -> None:
    with two(driver, kind) as (a, b):
        there, here = a.open(), b.open()
        tensors = [
            torch.empty(0), torch.ones(()), torch.randn(3, 5).t(), torch.randn(70_001),
            torch.randn(6, 6)[:, ::2], torch.arange(4096, dtype=torch.uint8),
        ]  # fmt: skip
        got = [torch.zeros(t.shape, dtype=t.dtype) for t in tensors]
        works = [here.irecv(buffer, 0, tag) for tag, buffer in enumerate(got)]
        for tag in reversed(range(len(tensors))):
            there.isend(tensors[tag], 1, tag)
        for work in works:
            work.wait(PATIENCE)
        driver.finish(b.compute)
        assert all(map(torch.equal, got, tensors))
        with pytest.raises(ValueError, match="contiguous"):
            here.irecv(torch.zeros(4, 4).t(), 0, 1)
        short = here.irecv(memory(0, 8), 0, 99)
        there.isend(memory(0, 9), 1, 99)
        with pytest.raises(PeerLost, match=r"awaited a message of 8 bytes, and one of 9 came"):
            short.wait(PATIENCE)
        there.close()
        here.close()


@every_path
def test_messages_of_any_size(kind: str) -> None:
    run(odd_sizes, kind)


def slow_copies(driver: Driver) -> None:
    """How long copies take is no delay of the link, also where they wait for each other."""
    with two(driver) as (a, b):
        there, here = a.open(), b.open()
        driver.slow_copies(COPY)
        works = [here.irecv(memory(0), 0, tag) for tag in range(3)]
        sends = [there.isend(memory(1), 1, tag) for tag in range(3)]
        stamps = [work.wait(PATIENCE) for work in works]
        assert all(s.delay >= 0 for s in stamps), [s.delay for s in stamps]
        in_time("the delay of a message", max(s.delay for s in stamps), COPY / 2)
        sent = [send.wait(PATIENCE).sent for send in sends]
        in_time("from the first producer's end to the last", max(sent) - min(sent), COPY)
        gaps = [b.sent - a.sent for a, b in pairwise(stamps)]
        assert min(gaps) > COPY / 2, "one copy after the other"
        until(lambda: copies_of(here)[1].count == 3, "all copies have passed")
        for copies in (copies_of(there)[0], copies_of(here)[1]):
            assert copies.seconds >= 3 * COPY
        there.close()
        here.close()


@pytest.mark.timing
@pytest.mark.quiet
def test_copies_are_no_part_of_the_links_delay() -> None:
    run(slow_copies)


def over_wires(driver: Driver) -> list[str]:
    """As a training opens its pipeline: over the engine, by the device that compute is on."""
    with two(driver) as sides:
        wires = []
        for side in sides:
            cuda._opened[os.getpid(), side.rank] = side.device
            wires.append(EngineWire(side.endpoint, side.rank))
        transports = [
            wires[i].transport("pipeline", [0, 1], [(0, 1), (1, 0)], None, torch.device("cuda", i))
            for i in (0, 1)
        ]
        got = memory(0)
        work = transports[1].irecv(got, 0, 1)
        transports[0].isend(memory(5), 1, 1)
        work.wait(PATIENCE)
        driver.finish(sides[1].compute)
        assert is_all(got, 5)
        staging = wires[0].staging(torch.device("cuda", 0))
        assert staging.memory().held > 0
        kinds = [f"{transport.traits.memory[0]} {transport.device}" for transport in transports]
        for transport, wire in zip(transports, wires, strict=True):
            transport.close()
            wire.close()
        return kinds


def test_a_wire_opens_it_for_a_gpu() -> None:
    assert run(over_wires) == ["cuda cuda:0", "cuda cuda:1"]


def copied_first(driver: Driver) -> None:
    """Where what was sent is written again, each message is copied before."""
    with two(driver) as (a, b):
        there, here = a.open(copies=True), b.open()
        got, sent = memory(0), memory(7)
        work = here.irecv(got, 0, 1)
        go = driver.stop(a.compute)
        there.isend(sent, 1, 1)
        sent.fill_(9)  # the test's GPU memory is the host's: the copy is there already
        go()
        work.wait(PATIENCE)
        driver.finish(b.compute)
        assert is_all(got, 7)
        there.close()
        here.close()


def test_a_message_may_be_written_to_again_where_it_is_copied() -> None:
    run(copied_first)
