"""How a process ends that has not closed everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from patience import PATIENCE

from megatron_adaptra.transport.engine import bindings

SCRIPT = Path(__file__).with_name("exit_script.py")


@pytest.mark.parametrize("wire", ["gloo", "engine"])
def test_a_process_ends_well_with_transports_open(wire: str) -> None:
    """Without its end it would abort: a thread comes back from gloo when its peer goes."""
    if wire == "engine" and bindings.missing():
        pytest.skip(bindings.missing())
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(store.port), wire],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline() == "ending\n"
        ranks[1].communicate("go\n", timeout=PATIENCE)
        _, errors = ranks[0].communicate(timeout=PATIENCE)
        assert (ranks[0].returncode, errors) == (0, "")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
