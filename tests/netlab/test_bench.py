"""`adaptra bench` over a link that is really slow."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from patience import in_time

from megatron_adaptra.transport.engine.bindings import missing

LINK = "40ms,bandwidth=20MB/s"
SIZE = 4 << 20  # bytes


@pytest.mark.long
@pytest.mark.timing
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_one_message_fills_a_long_link(shaper: str) -> None:
    """It takes delay and bandwidth, and little more; less would be no such link."""
    command = [sys.executable, "-m", "megatron_adaptra", "bench", "p2p", "--sizes", f"{SIZE}B"]
    done = subprocess.run(
        [*command, "--rounds", "5", "--link", LINK, "--json"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["link"] == LINK
    least = data["least_us"][str(SIZE)]
    assert least == pytest.approx(1e6 * (0.040 + SIZE / 20e6))
    took = {(r["transport"], r["direction"]): r["us_per_message"] / least for r in data["rows"]}
    assert took.keys() >= {("gloo", "one way"), ("tcp", "one way"), ("tcp", "both ways")}
    assert all(direction == "one way" or transport != "shm" for transport, direction in took)
    assert took["tcp", "one way"] > 0.99
    in_time("a message, beside the least that it takes", took["tcp", "one way"], 1.3)
