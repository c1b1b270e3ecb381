"""Memory and copies of the fake, by the driver alone and beside the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_runs import run_script
from patience import in_some_run

pytestmark = pytest.mark.large

MIB = 1 << 20


def scenario(name: str, **options: Any) -> Any:
    (found,) = run_script("memory_script.py", name, **options)
    return found


@pytest.mark.parametrize("preload", [0, 1])
def test_bytes_move_when_the_stream_comes_to_it(preload: int) -> None:
    """Also for a program that opens the driver's library and no other."""
    moved = {"early": 0, "late": True, "pageable": "a" * 100}

    def run() -> Any:
        found = scenario("copies", kernel_us=1000, preload=preload)
        assert {**found, "early": 0} == moved
        return found

    in_some_run(run, lambda found: found == moved)


def test_every_pointer_has_its_kind() -> None:
    assert scenario("kinds") == {
        "pageable": 1, "registered": 1, "twice": 712, "no more": 1, "unregistered twice": 713,
        "device": [2, 0], "pinned": 1, "free of a stranger": 1,
    }  # fmt: skip


def test_what_is_held_is_counted(tmp_path: Path) -> None:
    found = scenario("counted", accounts=tmp_path, mib=100)
    before, held, after = found["states"]
    assert before == {
        "used": 0, "device_bytes": 0, "device_peak": 0, "pinned_bytes": 0, "pinned_peak": 0,
    }  # fmt: skip
    peaks = {"device_peak": 3 * MIB, "pinned_peak": 2 * MIB}
    assert held == {"used": 3 * MIB, "device_bytes": 3 * MIB, "pinned_bytes": 2 * MIB, **peaks}
    assert after == {"used": 0, "device_bytes": 0, "pinned_bytes": 0, **peaks}
    assert found["full"] == 2
    assert found["calls"] > 5


def test_runtime_and_driver_share_everything() -> None:
    assert scenario("both") == {
        "device": 3, "of memory": 3, "query": 0, "byte": 5, "driver's": 0,
    }  # fmt: skip


def test_a_copy_takes_time_that_the_host_does_not_wait_for() -> None:
    def run() -> Any:
        found = scenario("long_copy", copy_gbps=0.1)  # 0.67 s
        assert found["took"] > 0.6
        return found

    in_some_run(run, lambda found: found["returned"] < 0.3 and found["busy"] == 600)


@pytest.mark.parametrize("payload", [1, 16])
def test_copies_share_what_the_way_carries(payload: int) -> None:
    """And a byte takes what `payload` bytes do."""
    out, back = (payload * 4 * MIB / rate for rate in (0.4e9, 0.2e9))
    expected = {"out": out, "back": back, "both ways": back, "twice": 2 * out}

    def run() -> Any:
        found = scenario("rates", to_host_gbps=0.4, to_device_gbps=0.2, payload=payload)
        assert all(found[name] >= expected[name] for name in expected), found
        return found

    # The host launches the second copy a little later than the first.
    in_some_run(
        run, lambda found: all(found[name] - expected[name] < 0.5 * out for name in expected)
    )


@pytest.mark.long
@pytest.mark.parametrize("ppm", [-500, 500])
def test_events_show_the_devices_own_clock(ppm: int) -> None:
    expected = 4 * MIB / 0.004e9 * (1 + 1e-6 * ppm)  # 1 s

    def run() -> Any:
        found = scenario("rates", to_host_gbps=0.004, clock_ppm=ppm)
        assert found["out"] > (1 - 1e-5) * expected
        return found

    # On a busy machine the copy begins a little later than the event.
    in_some_run(run, lambda found: found["out"] < (1 + 1e-4) * expected)
