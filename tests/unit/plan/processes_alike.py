"""What a script prints in processes whose sets have orders of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1]
PATHS = (HERE, HERE.parent, TESTS / "support", TESTS.parent)  # as for this folder's tests


def printed(script: str) -> str:
    """The same in each of two processes that hash texts differently, at the same time."""
    path = os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")])

    def run(seed: str) -> str:
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=True
        ).stdout

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(run, ("0", "1"))
    assert first == second
    return first
