"""A process with an engine may fork, as data loaders do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT
from patience import PATIENCE

from megatron_adaptra.transport.engine import bindings

SCRIPT = Path(__file__).with_name("engine_fork_script.py")


@pytest.mark.long
def test_a_child_leaves_the_engine_alone(tmp_path: Path) -> None:
    """Over shared memory and over TCP."""
    if bindings.missing():
        pytest.skip(bindings.missing())
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done with shm\ndone with tcp\n"), done.stderr
