"""Running the demo and small Megatron scripts: as a user would, or as forks of a zygote."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from zygote import Zygote

from megatron_adaptra.demo.options import DemoOptions

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
SMALL = ("--hidden-size", "32", "--seq-length", "32")
RANK = Path(__file__).parent / "ranks" / "demo_rank.py"


@functools.cache
def zygote(plugin: bool) -> Zygote:
    """One for stock Megatron and own scripts, and one where the plugin has registered itself."""
    made = Zygote(plugin)
    atexit.register(made.end)
    return made


def demo(out: Path, *options: str, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    """`adaptra demo`, from its command line to its end."""
    command = [sys.executable, "-m", "megatron_adaptra", "demo", "--out", str(out), *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT, check=False
    )


def summary(out: Path, **options: Any) -> dict[str, Any]:
    """The summary of the demo's ranks, which have to succeed; see DemoOptions."""
    chosen = DemoOptions(**{"hidden_size": 32, "seq_length": 32, "out": str(out), **options})
    done = zygote(False).run(out, [str(RANK), chosen.dump()], ranks=chosen.world)
    assert done.status == 0, done.text[-4000:]
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found
