"""Many ranks of the engine on one machine: what each takes, and that it does nothing when idle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

SCRIPT = Path(__file__).parents[3] / "benchmarks/engine_scale.py"
THREADS = 3  # of an endpoint: its loop, its listener, its keeper
LISTENING = 2
CONNECTIONS = {"tcp": 4, "shm": 1}  # to a peer


def costs(*words: object) -> Any:
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr  # nobody takes the end of a peer for a failure
    return json.loads(done.stdout)


@pytest.mark.large
@pytest.mark.parametrize(("kind", "ranks"), [("tcp", 64), ("shm", 16)])
def test_all_to_all(kind: str, ranks: int) -> None:
    row = costs("--kind", kind, "--ranks", ranks, "--processes", 4, "--idle", 0.1)
    assert row["threads"] == THREADS
    assert row["sockets"] == LISTENING + CONNECTIONS[kind] * (ranks - 1)


@pytest.mark.crowd
@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_idle_with_eight_peers(kind: str) -> None:
    row = costs("--kind", kind, "--ranks", 9, "--processes", 9, "--idle", 5)
    assert 0 < row["idle share of a core"] < 0.01
