"""What native is expected to take: gloo's rings, two of them at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.common import equal_ports
from megatron_adaptra.plan.reductions.figures import Buffers, Figures
from megatron_adaptra.plan.reductions.simulated import natively

MS, RANKS = 1e-3, 8
# 8 hosts of 20 MB/s, 10 ms from each other; 0.87 MB in four buffers (docs/evidence/allreduce.md).
NBYTES, DELAY = 870_400, 10.3 * MS


def seconds(buffers: Buffers, nbytes: int = NBYTES, delay: float = DELAY) -> float:
    ports = equal_ports([19.8e6] * RANKS, delay, 0.1 * MS)
    return natively(Figures(nbytes, ports, (0.0,) * RANKS, 2.0, buffers=buffers), 2)


def test_buffers_that_overlap_are_reduced_two_at_a_time() -> None:
    """Measured: 509 ms after the last gradients, where all at once would take 294."""
    overlap, last = 118 * MS, NBYTES // 10
    assert seconds(Buffers(4, overlap, last)) == pytest.approx(509 * MS, rel=0.05)
    small = [seconds(Buffers(n, 1 * MS, 1000), 8000) for n in (2, 4, 5, 6)]
    two, four, five, six = small  # bytes take nothing
    delays = 2 * DELAY * 2 * (RANKS - 1)  # that a ring crosses
    assert four - two == pytest.approx(delays, rel=0.1)
    assert six - four == pytest.approx(delays, rel=0.1)
    assert five == six


def test_bytes_take_as_long_in_any_number_of_buffers() -> None:
    nbytes, delay = 80_000_000, 0.01 * MS
    alone, last = Buffers(1, 1e-9, nbytes), nbytes // 8
    for count in (2, 3, 8):
        took = seconds(Buffers(count, 1e-9, last), nbytes, delay)
        assert took == pytest.approx(seconds(alone, nbytes, delay), rel=0.02)


def test_what_waits_for_the_one_before_is_reduced_one_at_a_time() -> None:
    one = seconds(Buffers(), NBYTES // 4)
    assert seconds(Buffers(4)) == pytest.approx(4 * one)


def test_a_late_rank_delays_the_first_ones() -> None:
    ports = equal_ports([19.8e6] * RANKS, DELAY, 0.1 * MS)
    late = (0.0,) * (RANKS - 1) + (0.2,)
    given = Figures(NBYTES, ports, late, 2.0, buffers=Buffers(4, 0.1, NBYTES // 10))
    in_time = natively(replace(given, lateness=(0.0,) * RANKS), 2)
    assert natively(given, 2) <= in_time
