"""Shared by the tests of the launch scripts."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REAL = [Path(p) for p in os.environ.get("ADAPTRA_MEGATRON_LM", "").split(":") if p]

# Variables that would change what a script does.
_OURS = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GPUS_PER_NODE", "RDZV_ID")
_OURS += ("MAX_RESTARTS", "MEGATRON_LM", "RANK", "WORLD_SIZE", "MAKEFLAGS")


def clean_env(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in _OURS and k[:4] not in ("PET_", "SLUR")}
    return {**kept, "ADAPTRA_PYTHON": sys.executable, **more}


def run(
    *command: object, timeout: float = 300, cwd: Path = ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd, env=clean_env(**env), capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refusal."""
    assert result.returncode == 2, result.stdout + result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def too_new(checkout: Path) -> str:
    """Why this Python cannot run that checkout, or nothing."""
    text = (checkout / "pyproject.toml").read_text()
    needs = re.search(r'requires-python = ">=3\.(\d+)"', text)
    if needs and int(needs[1]) > sys.version_info[1]:
        return f"{checkout.name} needs Python 3.{needs[1]}; this is 3.{sys.version_info[1]}"
    return ""
