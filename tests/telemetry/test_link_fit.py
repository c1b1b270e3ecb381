"""Delay and bandwidth of a link are separated, whatever queues, and whatever clocks differ."""

from __future__ import annotations

import math
import random

import pytest

from megatron_adaptra.telemetry.link_fit import LinkFit, Sample, fit_line, transmissions
from megatron_adaptra.transport.base import Stamps

MB = 1e6


def messages(
    delay: float,
    bandwidth: float,
    sends: list[tuple[float, float]],
    *,
    clock: float = 0.0,
    rng: random.Random | None = None,
    eager: bool = True,
) -> list[tuple[float, Stamps]]:
    """What a link delivers that puts out one message after another; `sends`: seconds and bytes."""
    free, out = 0.0, []
    for sent, nbytes in sends:
        free = max(sent, free) + nbytes / bandwidth
        late = rng.expovariate(1 / 3e-4) if rng else 0.0
        out.append(
            (nbytes, Stamps(sent, sent - 1 + clock, free + delay + late + clock, eager=eager))
        )
    return out


@pytest.mark.parametrize("clock", [0.0, 4000.0, -0.013])
@pytest.mark.parametrize(("delay", "bandwidth"), [(0.0, 20 * MB), (0.04, 1e15), (0.04, 20 * MB)])
def test_a_queue_is_no_slower_link(delay: float, bandwidth: float, clock: float) -> None:
    """Eight messages at once: the last one arrives after eight times its own seconds."""
    burst = messages(delay, bandwidth, [(1.0, MB)] * 8, clock=clock)
    (sample,) = transmissions(burst, delay + clock)
    assert sample.nbytes == MB
    assert sample.seconds == pytest.approx(MB / bandwidth, abs=1e-6)


@pytest.mark.parametrize(
    ("delay", "bandwidth"), [(2e-4, 20 * MB), (0.04, 20 * MB), (0.04, 45 * MB)]
)
def test_within_a_tenth_after_ten_iterations(delay: float, bandwidth: float) -> None:
    """Messages of one size, some of them queued, and a small one per iteration; all jitter."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng, fit = random.Random(seed), LinkFit()
    for _ in range(10):
        now = 1.0
        small = messages(delay, bandwidth, [(now, 8)], rng=rng)[0][1].delay
        sends = []
        for _ in range(8):
            now += rng.choice([0.002, 0.03, 0.2])
            sends.append((now, MB))
        fit.add([Sample(8, small)])
        large = transmissions(messages(delay, bandwidth, sends, rng=rng), small)
        fit.add(Sample(s.nbytes, small + s.seconds) for s in large)
    found = fit.fit()
    assert found is not None
    assert found.sure
    assert found.bandwidth == pytest.approx(bandwidth, rel=0.1)
    assert found.delay == pytest.approx(delay, rel=0.1, abs=2e-3)


def test_sizes_that_change_are_fitted_by_their_bytes() -> None:
    rng = random.Random(5)
    samples = [
        Sample(n, 0.003 + n / (50 * MB)) for n in (rng.uniform(1e5, 4 * MB) for _ in range(9))
    ]
    samples[2] = Sample(samples[2].nbytes, 9.0)  # one message was late
    fit = fit_line(samples)
    assert fit is not None
    assert (fit.delay, fit.bandwidth) == pytest.approx((0.003, 50 * MB), rel=1e-6)


def test_many_sizes_of_an_iteration_come_in_few_groups() -> None:
    sends = [(float(i), 1e5 * (i + 1)) for i in range(30)]
    found = transmissions(messages(0.01, 10 * MB, sends), 0.01)
    assert len(found) == 4
    for sample in found:
        assert sample.seconds == pytest.approx(sample.nbytes / (10 * MB))


def test_noise_alone_is_no_bandwidth() -> None:
    """Of a fast link more bytes are not known to take longer, so its bandwidth has no limit."""
    rng = random.Random(3)
    fit = LinkFit()
    for _ in range(6):
        fit.add([Sample(8, rng.uniform(1e-3, 2e-3)), Sample(1e5, rng.uniform(1e-3, 2e-3))])
    found = fit.fit()
    assert found is not None
    assert not found.sure
    assert found.bandwidth == math.inf


def test_a_changed_link_is_fitted_anew() -> None:
    fit = LinkFit()
    for seconds in (0.001, 0.001, 0.001, 0.001, 0.051, 0.051):
        fit.add([Sample(8, 0.0), Sample(MB, seconds)])
    before = fit.fit()
    fit.restart(2)
    after = fit.fit()
    assert before is not None
    assert after is not None
    assert before.per_byte * MB == pytest.approx(0.001, rel=1e-4)
    assert after.per_byte * MB == pytest.approx(0.051, rel=1e-4)


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf])
def test_nonsense_is_left_out(nonsense: float) -> None:
    fit = LinkFit()
    fit.add([Sample(8, nonsense), Sample(nonsense, 1.0)])
    assert fit.fit() is None
    fit.add([Sample(8, 0.001), Sample(MB, 0.002), Sample(MB, nonsense)])
    assert fit.fit() is not None


def test_one_size_gives_no_bandwidth() -> None:
    assert fit_line([Sample(8, 0.1), Sample(8, 0.2)]) is None
    assert LinkFit().fit() is None


def test_messages_that_get_faster_with_their_size_have_no_limit() -> None:
    fit = fit_line([Sample(8, 0.2), Sample(MB, 0.1), Sample(8, 0.21), Sample(MB, 0.11)])
    assert fit is not None
    assert fit.per_byte == 0.0
    assert fit.bandwidth == math.inf


def test_who_waited_for_its_receive_says_nothing() -> None:
    """Unless all of them did."""
    late = Stamps(sent=1.0, posted=1.5, completed=1.55)
    good = Stamps(sent=2.0, posted=1.6, completed=2.06)
    assert transmissions([(MB, late), (MB, good)], 0.01) == [Sample(MB, pytest.approx(0.05))]
    assert len(transmissions([(MB, late)], 0.01)) == 1
