"""The emulator holds messages of a GPU from when they could leave."""

from __future__ import annotations

import time

import pytest
from controlled.test_messages import is_all, memory
from fakes.controlled_cuda.gpu import Driver, run, two
from patience import PATIENCE, in_time

from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.emulate.links import LinkEmulator
from megatron_adaptra.emulate.rules import parse_rules

DELAY, LATE = 0.15, 0.1  # seconds


def slow_link(driver: Driver) -> None:
    with two(driver) as (a, b):
        there = a.open(emulator=LinkEmulator(0, parse_rules("0>1:150ms", 2)))
        here = b.open(emulator=LinkEmulator(1, parse_rules("0>1:150ms", 2)))
        got = [memory(0) for _ in range(3)]
        works = [here.irecv(buffer, 0, tag) for tag, buffer in enumerate(got)]
        go = driver.stop(a.compute)
        sends = [there.isend(memory(tag + 1), 1, tag) for tag in range(3)]
        time.sleep(LATE)  # the producer's, not the link's
        assert not any(send.done() for send in sends)
        go()
        stamps = [work.wait(PATIENCE) for work in works]
        driver.finish(b.compute)
        assert [is_all(buffer, tag + 1) for tag, buffer in enumerate(got)] == [True] * 3
        assert min(s.delay for s in stamps) >= DELAY
        in_time("the delay of a message", min(s.delay for s in stamps), DELAY + LATE)
        for send in sends:
            send.wait(PATIENCE)
        back = there.irecv(memory(0), 1, 9)
        here.isend(memory(1), 0, 9)
        in_time("the way back", back.wait(PATIENCE).delay, DELAY)
        there.close()
        here.close()


@pytest.mark.timing
@pytest.mark.quiet
def test_an_emulated_link_delays_what_could_leave() -> None:
    run(slow_link)


def closed_while_held(driver: Driver) -> None:
    with two(driver) as (a, b):
        there, here = a.open(emulator=LinkEmulator(0, parse_rules("0>1:60s", 2))), b.open()
        works = [there.isend(memory(1), 1, tag) for tag in range(3)]
        works[0].abort()
        there.close()
        for work in works:
            with pytest.raises(PeerLost, match="aborted"):
                work.wait(PATIENCE)
        here.close()


def test_close_drops_what_the_emulator_holds() -> None:
    run(closed_while_held)
