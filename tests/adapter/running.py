"""Running the demo and small Megatron scripts as a user would: in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
SMALL = ("--hidden-size", "32", "--seq-length", "32")


def demo(out: Path, *options: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_adaptra", "demo", "--out", str(out), *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT, check=False
    )


def summary(out: Path, *options: str) -> dict[str, Any]:
    """The summary of a demo run that has to succeed."""
    done = demo(out, "--json", *SMALL, *options)
    log = out / "ranks.log"
    assert done.returncode == 0, done.stderr + (log.read_text()[-4000:] if log.exists() else "")
    printed: dict[str, Any] = json.loads(done.stdout)
    assert printed == json.loads((out / "summary.json").read_text())
    return printed


def torchrun(
    script: Path, ranks: int, *arguments: str, timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(script), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT, check=False
    )


def decisions(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "decisions.jsonl").read_text().splitlines()]
