"""Moments of streams on the host's clock."""

from __future__ import annotations

import random
import time

import pytest
from fakes.controlled_cuda.gpu import Driver, run, until

from megatron_adaptra.base.errors import DeviceFailed
from megatron_adaptra.device.base import HostDevice
from megatron_adaptra.device.cuda import CudaDevice

STEP = 0.02  # seconds between moments, at least
LEAP = 0.1  # seconds
LATE = 0.01  # seconds that a machine may take to look at its clock, beside those of an anchor


def opened(driver: Driver) -> tuple[CudaDevice, int, float]:
    """A device, a stream of it, and the seconds in which its first anchor was seen.

    An anchor that was seen late makes moments as late, until there is a better one.
    """
    stream, began = driver.stream(), time.monotonic()
    device = CudaDevice(0, lambda: stream)
    until(lambda: device.handle.anchors() == 1, "the first anchor is there")
    return device, stream, time.monotonic() - began


def late_stream(driver: Driver, offset: float, rate: float) -> None:
    """What the stream passes late is read late, and has the moment when it was passed."""
    driver.clock(offset, rate)
    device, stream, opening = opened(driver)
    for _ in range(5):
        go = driver.stop(stream)
        called = time.monotonic()
        mark = device.mark()
        returned = time.monotonic()
        assert mark.at() is None
        time.sleep(STEP)
        went = time.monotonic()
        go()
        driver.finish(stream)
        over = time.monotonic()
        moment = mark.at()
        assert called <= mark.recorded <= returned
        assert moment is not None
        assert went <= moment <= over + LATE + opening, (moment - went, over - moment)
        assert mark.at() == moment
        device.anchor()
    assert driver.left()["events"] < 10  # they are used again
    device.close()
    assert driver.left() == {"pinned": 0, "streams": 0, "events": 0, "contexts": 0}


@pytest.mark.parametrize(("offset", "rate"), [(0.0, 1.0), (-1e6, 1.0005), (1e9, 0.9995)])
def test_a_mark_is_read_late_and_says_when(offset: float, rate: float) -> None:
    run(late_stream, offset, rate)


def in_order(driver: Driver, seed: int) -> None:
    rng = random.Random(seed)
    device, stream, _ = opened(driver)
    marks, moments = [], []
    for _ in range(300):
        if rng.random() < 0.2:
            device.anchor()
        marks.append(device.mark())
        if rng.random() < 0.1:
            driver.finish(stream)
        while rng.random() < 0.9 and len(moments) < len(marks):  # else they get too old
            if (moment := marks[len(moments)].at()) is None:
                break
            moments.append(moment)
    driver.finish(stream)
    moments += [mark.at() for mark in marks[len(moments) :]]
    assert None not in moments, f"seed {seed}"
    assert moments == sorted(moments), f"seed {seed}"
    assert all(m.recorded - 1e-5 <= at for m, at in zip(marks, moments, strict=True)), seed
    _, calls, _ = device.handle.calls()
    assert device.handle.marks() == len(marks)
    anchors = calls - 4 * len(marks)
    assert anchors < 4 * len(marks), "two calls to make a mark, and few to read it"
    device.close()


def test_moments_keep_the_order_of_their_stream() -> None:
    run(in_order, random.randrange(1 << 30))


def drifting(driver: Driver) -> None:
    """A GPU's clock that is slow makes moments long after the anchor seem earlier than they are."""
    driver.clock(1e6, 0.9995)  # as where NTP slews the host's
    device, stream, opening = opened(driver)
    time.sleep(0.5)  # 250 us, more than a mark on an idle stream takes
    for _ in range(20):
        called = time.monotonic()
        mark = device.mark()
        driver.finish(stream)
        over = time.monotonic()
        moment = mark.at()
        assert moment is not None, mark.fault
        assert called <= mark.recorded <= moment <= over + LATE + opening
    device.close()


def test_clocks_drift_in_long_iterations() -> None:
    run(drifting)


def better_anchor(driver: Driver) -> None:
    """The clocks turn out to be nearer to each other than was thought: no mark changes places."""
    device, stream, _ = opened(driver)
    driver.clock(1e6 + LEAP, 1.0)  # as if the first anchor had been seen that late
    before = device.mark()
    began = time.monotonic()
    device.anchor()
    until(lambda: device.handle.anchors() == 2, "the second anchor is there")
    seen = time.monotonic() - began
    after = device.mark()
    driver.finish(stream)
    time.sleep(2 * LEAP)
    moments = before.at(), after.at()
    assert moments[0] is not None
    assert moments[1] is not None
    assert before.recorded + LEAP <= moments[0] <= moments[1]
    later = device.mark()
    driver.finish(stream)
    over = time.monotonic()
    assert later.at() <= over + LATE + seen, "and from here on the better one counts"
    device.close()


def test_a_better_anchor_keeps_the_order() -> None:
    run(better_anchor)


def never_a_number(driver: Driver) -> None:
    device, stream, _ = opened(driver)
    driver.capture(stream, True)
    mark = device.mark()
    driver.capture(stream, False)
    assert mark.at() is None
    assert "captured into a graph" in mark.fault
    driver.clock(-1e6, 1.0)  # backwards: the next events seem to have passed long before
    mark = device.mark()
    driver.finish(stream)
    assert mark.at() is None
    assert "s before it was recorded" in mark.fault
    driver.clock(1e6, 1.0)
    mark = device.mark()
    driver.finish(stream)
    for anchors in range(2, 40):
        device.anchor()
        driver.finish(stream)
        until(lambda n=anchors: device.handle.anchors() >= n, "one more anchor is there")
    assert mark.at() is None
    assert "older than every anchor" in mark.fault
    driver.fail("cuEventRecord", code=2)
    with pytest.raises(DeviceFailed, match=r"cuEventRecord failed: CUDA_ERROR_OUT_OF_MEMORY \(2, "):
        device.mark()
    mark = device.mark()
    driver.fail("cuEventQuery")
    driver.finish(stream)
    assert mark.at() is None
    assert "cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS (700, an illegal" in mark.fault
    device.close()


def test_what_cannot_be_is_no_number() -> None:
    run(never_a_number)


def closed(driver: Driver) -> None:
    device, stream, _ = opened(driver)
    mark = device.mark()
    driver.finish(stream)
    device.close()
    device.close()
    assert mark.at() is None
    assert "closed" in mark.fault
    with pytest.raises(DeviceFailed, match="closed"):
        device.mark()
    again, *_ = opened(driver)
    again.close()
    assert driver.left() == {"pinned": 0, "streams": 0, "events": 0, "contexts": 0}


def test_a_device_closes_and_opens_again() -> None:
    run(closed)


def too_old(driver: Driver, version: int, devices: int) -> str:
    driver.version(version, devices)
    with pytest.raises(DeviceFailed) as error:
        CudaDevice(0)
    return str(error.value)


def test_no_driver_to_use_is_one_reason() -> None:
    words = run(too_old, 11020, 1)
    assert words == "the CUDA driver is of version 11.2; 11.4 or later is needed"
    assert run(too_old, 13000, 0).startswith("the CUDA driver sees no GPU; ")


def test_the_hosts_clock_has_the_same_interface() -> None:
    device = HostDevice()
    before = time.monotonic()
    mark = device.mark()
    device.anchor()
    assert before <= mark.recorded <= time.monotonic()
    assert mark.at() == mark.recorded
    assert mark.fault == ""
    device.close()
