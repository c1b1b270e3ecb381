"""A large message over the fake PCIe takes about as long as over the wire alone."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runs import run_script
from patience import in_some_run

from megatron_adaptra.transport.engine import bindings

PCIE, WIRE = 0.5, 100  # GB/s, MB/s: a rate that a busy machine can hold, and five times as much
MIB, PIECE = 64, 4
MOST, WHOLE = 1.25, 1.3  # times the wire alone: in pieces at most, whole at least


@pytest.mark.timing
@pytest.mark.quiet
@pytest.mark.skipif(bool(bindings.missing()), reason=bindings.missing() or "-")
def test_copies_are_hidden_behind_the_wire() -> None:
    """Whole, a message takes 1.4 times as long: the wire, and a fifth of that for each copy."""

    def run() -> Any:
        words = map(str, (MIB, WIRE, 3, MIB, PIECE))
        rates = {"to_host_gbps": PCIE, "to_device_gbps": PCIE}
        (found,) = run_script("pieces_script.py", *words, **rates)
        return found["ratios"]

    in_some_run(run, lambda found: found[str(PIECE)] <= MOST and found[str(MIB)] >= WHOLE)
