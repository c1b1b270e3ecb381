"""Messages over RDMA with long and slow links: what is under way, and which path carries it."""

from __future__ import annotations

import ctypes
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fakes.controlled_verbs.pair import IPV4, Pair, put
from fakes.controlled_verbs.verbs import Fabric, run
from patience import PATIENCE

from megatron_adaptra.transport.engine.dial import ORDER_TCP

MIB = 1 << 20
SLOTS = 8 * MIB  # of a path, as it begins
PART, PARTS = 6 * MIB, 4
_BYTES = random.Random(5).randbytes(PART + PARTS)


def part(number: int) -> bytes:
    return _BYTES[number : number + PART]


@contextmanager
def connected(fabric: Fabric, *, tcp: bool = False, of: int = 1) -> Iterator[Pair]:
    """Both ends of a rail, as two peers of an engine; with a connection of TCP beside it or not.

    `of`: how many connections share the port's memory. This one is alone all the same.
    """
    put(fabric, {0: (IPV4, 2)}, {0: (IPV4, 2)})
    pair = Pair({"NCCL_IB_QPS_PER_CONNECTION": str(of)})
    ends = pair.opened(0), pair.opened(1)
    ends[0].connect(ends[1].card())
    ends[1].connect(ends[0].card())
    for rank, (end, beside) in enumerate(zip(ends, socket.socketpair(), strict=True)):
        pair.engine.add_verbs(rank, end, beside.detach(), 1)
    if tcp:
        with socket.create_server(("127.0.0.1", 0)) as server:
            here = socket.create_connection(server.getsockname())
            there, _ = server.accept()
        pair.engine.add_tcp(0, here.detach(), ORDER_TCP)
        pair.engine.add_tcp(1, there.detach(), ORDER_TCP)
    try:
        yield pair
    finally:
        pair.close()


class Blocks:
    """Memory of both ends, for PARTS messages."""

    def __init__(self, pair: Pair) -> None:
        self.engine = pair.engine
        self.sources, self.targets = (
            [pair.engine.take(PART) for _ in range(PARTS)] for _ in range(2)
        )
        for n, source in enumerate(self.sources):
            ctypes.memmove(source.address, part(n), PART)

    def carry(self, times: int, parts: Sequence[int] = range(PARTS), size: int = PART) -> None:
        """`size` bytes of each of these parts, all at once; they arrive as they were."""
        for _ in range(times):
            works = []
            for n in parts:
                ctypes.memset(self.targets[n].address, 0, size)
                works.append(self.engine.receive(1, n, self.targets[n].address, size))
                works.append(self.engine.send(0, n, self.sources[n].address, size))
            for work in works:
                assert work.wait(PATIENCE / 5), "still under way"
                assert not work.error()
            for n in parts:
                assert ctypes.string_at(self.targets[n].address, size) == part(n)[:size]


def _grown(fabric: Fabric, delay: float, rate: int, of: int = 1, size: int = 3 * PART) -> int:
    """The most bytes under way while four blocks of `size` in all each cross."""
    fabric.link(delay, rate)
    with connected(fabric, of=of) as pair:
        Blocks(pair).carry(-(-size // PART), size=min(size, PART))
    return fabric.under_way()


def test_what_is_under_way_grows_with_a_long_link() -> None:
    """0.1 s each way and 400 MB/s hold 80 MB; at first 8 MiB may be under way."""
    assert run(_grown, 0.1, 400) > 2 * SLOTS


def test_connections_of_one_port_share_its_memory() -> None:
    """Of four each begins with 2 MiB, and has 16 MiB at most.

    A link of 5 MB/s seems to need more than that only where each of its answers is 0.2 s late.
    """
    assert run(_grown, 0.001, 5, 4, MIB) < SLOTS / 4 + MIB
    assert SLOTS < run(_grown, 0.1, 400, 4) < 2 * SLOTS + MIB
    assert run(_grown, 0.001, 100, 128) <= 8 * (128 << 10) + MIB / 2


def test_a_thin_link_holds_little() -> None:
    """What is more would wait at the device, and small messages behind it."""
    assert run(_grown, 0.001, 20, 1, PART // 2) < SLOTS + MIB


def _refused(fabric: Fabric) -> int:
    fabric.link(0.1, 400)
    with connected(fabric) as pair:
        blocks = Blocks(pair)
        for n in range(PARTS):  # their memory is registered; one alone needs no more slots
            blocks.carry(1, [n])
        fabric.registrations(0)
        blocks.carry(3)
    return fabric.under_way()


def test_memory_that_cannot_be_had_costs_speed_alone() -> None:
    assert SLOTS // 2 <= run(_refused) < SLOTS + MIB


def _beside_tcp(fabric: Fabric, rate: int, size: int) -> float:
    """The rail's part of what is sent."""
    fabric.link(0.001, rate)
    with connected(fabric, tcp=True) as pair:
        blocks = Blocks(pair)
        blocks.carry(1, size=size)  # the rate shows
        before = fabric.moved()
        blocks.carry(2, size=size)
        return (fabric.moved() - before) / (2 * PARTS * size)


def test_a_slow_rail_leaves_messages_to_tcp() -> None:
    assert run(_beside_tcp, 10, PART) < 0.5


def test_a_fast_rail_carries_all() -> None:
    assert run(_beside_tcp, 0, 64 << 10) > 0.99
