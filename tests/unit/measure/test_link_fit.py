"""Delay and bandwidth of a link are separated, whatever queues, and whatever clocks differ."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest

from megatron_adaptra.measure.link_fit import WINDOW, Fit, LinkFit, Sample, slope_of, transmissions
from megatron_adaptra.measure.statistics import exceeded, tail
from megatron_adaptra.transport.base import Stamps

MB = 1e6


def bandwidth_of(fit: Fit) -> float:
    """Bytes per second; infinite where more bytes are not known to take longer."""
    return 1 / fit.per_byte if fit.sure and fit.per_byte > 0 else math.inf


def messages(
    delay: float,
    bandwidth: float,
    sends: list[tuple[float, float]],
    *,
    clock: float = 0.0,
    rng: random.Random | None = None,
    eager: bool = True,
) -> list[Stamps]:
    """What a link delivers that puts out one message after another; `sends`: seconds and bytes."""
    free, out = 0.0, []
    for sent, nbytes in sends:
        free = max(sent, free) + nbytes / bandwidth
        late = rng.expovariate(1 / 3e-4) if rng else 0.0
        arrived = free + delay + late + clock
        out.append(Stamps(sent, sent - 1 + clock, arrived, eager=eager, nbytes=int(nbytes)))
    return out


@pytest.mark.parametrize("clock", [0.0, 4000.0, -0.013])
@pytest.mark.parametrize(("delay", "bandwidth"), [(0.0, 20 * MB), (0.04, 1e15), (0.04, 20 * MB)])
def test_a_queue_is_no_slower_link(delay: float, bandwidth: float, clock: float) -> None:
    """Eight messages at once: the last one arrives after eight times its own seconds."""
    burst = messages(delay, bandwidth, [(1.0, MB)] * 8, clock=clock)
    (sample,) = transmissions(burst, delay + clock)
    assert sample.nbytes == MB
    assert sample.seconds == pytest.approx(MB / bandwidth, abs=1e-6)


def test_sizes_that_change_are_fitted_by_their_bytes() -> None:
    rng, fit = random.Random(5), LinkFit()
    for late in range(WINDOW):
        sizes = [rng.uniform(1e5, 4 * MB) for _ in range(9)]
        row = [Sample(n, 0.003 + n / (50 * MB)) for n in [8, *sizes]]
        row[2] = Sample(row[2].nbytes, 9.0)  # one message was late
        if late == 3:
            row[0] = Sample(8, 0.2)  # and once the small one
        fit.add(row)
    found = fit.fit()
    assert found is not None
    assert (found.delay, bandwidth_of(found)) == pytest.approx((0.003, 50 * MB), rel=1e-6)


def test_many_sizes_of_an_iteration_come_in_few_groups() -> None:
    sizes = [1e5 * (i + 1) for i in range(30)]
    found = transmissions(messages(0.01, 10 * MB, list(enumerate(sizes))), 0.01)
    assert len(found) == 4
    for i, sample in enumerate(found):
        group = sizes[30 * i // 4 : 30 * (i + 1) // 4]
        assert sample.nbytes == median(group)
        assert sample.seconds == pytest.approx(group[len(group) // 4] / (10 * MB))


def test_noise_alone_is_no_bandwidth() -> None:
    """Of a fast link more bytes are not known to take longer, so its bandwidth has no limit."""
    rng = random.Random(3)
    fit = LinkFit()
    for _ in range(6):
        fit.add([Sample(8, rng.uniform(1e-3, 2e-3)), Sample(1e5, rng.uniform(1e-3, 2e-3))])
    found = fit.fit()
    assert found is not None
    assert not found.sure
    assert bandwidth_of(found) == math.inf


@pytest.mark.parametrize(("old", "new"), [(0.001, 0.051), (0.051, 0.001), (0.02, 0.05)])
def test_a_changed_link_is_fitted_anew(old: float, new: float) -> None:
    """From the second iteration on; one alone may be a message that was late."""
    fit, per_byte = LinkFit(), []
    for seconds in [old] * 6 + [new] * 2:
        fit.add([Sample(8, 0.0), Sample(MB, seconds)])
        found = fit.fit()
        assert found is not None
        per_byte.append(found.per_byte)
    assert per_byte[6] * MB == pytest.approx(old, rel=1e-4)
    assert per_byte[7] * MB == pytest.approx(new, rel=1e-4)


def test_a_delay_that_changes_leaves_the_bandwidth_alone() -> None:
    rng, fit = random.Random(9), LinkFit()
    for delay in [0.001] * 5 + [0.081] * 5:
        wire = 0.02 + rng.uniform(-1e-3, 1e-3)
        fit.add([Sample(8, delay), Sample(MB, delay + wire)])
    found = fit.fit()
    assert found is not None
    assert found.sure
    assert bandwidth_of(found) == pytest.approx(50 * MB, rel=0.05)


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf])
def test_nonsense_is_left_out(nonsense: float) -> None:
    fit = LinkFit()
    fit.add([Sample(8, nonsense), Sample(nonsense, 1.0)])
    assert fit.fit() is None
    fit.add([Sample(8, 0.001), Sample(MB, 0.002), Sample(MB, nonsense)])
    assert fit.fit() is not None


def test_one_size_gives_no_bandwidth() -> None:
    assert slope_of([Sample(8, 0.1), Sample(8, 0.2)]) is None
    assert LinkFit().fit() is None


def test_messages_that_get_faster_with_their_size_have_no_limit() -> None:
    fit = LinkFit()
    for i in range(WINDOW):
        fit.add([Sample(8, 0.2 + i / 1e4), Sample(MB, 0.1 + i / 2e4)])
    found = fit.fit()
    assert found is not None
    assert found.per_byte == 0.0
    assert bandwidth_of(found) == math.inf


@pytest.mark.parametrize(
    # Student's table, as any book has it.
    ("chance", "freedom", "t"),
    [(0.05, 1, 6.314), (0.05, 2, 2.920), (0.05, 9, 1.833), (0.001, 4, 7.173), (0.0005, 8, 5.041)],
)
def test_t_is_students(chance: float, freedom: int, t: float) -> None:
    assert exceeded(chance, freedom) == pytest.approx(t, abs=1e-3)
    assert tail(exceeded(chance, freedom), freedom) == pytest.approx(chance)


def test_who_waited_for_its_receive_says_nothing() -> None:
    """Unless all of them did."""
    late = Stamps(sent=1.0, posted=1.5, completed=1.55, nbytes=1000)
    good = Stamps(sent=2.0, posted=1.6, completed=2.06, nbytes=1000)
    assert transmissions([late, good], 0.01) == [Sample(1000, pytest.approx(0.05))]
    assert len(transmissions([late], 0.01)) == 1
