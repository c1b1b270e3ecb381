"""Runs of Megatron-LM's own unit tests in as many processes as they want GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcomes import Outcomes, read

from megatron_adaptra.adapter.compat.profiles import NEWEST
from megatron_adaptra.base.processes import die_with_parent

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STOCK = "stock"
ARMS: dict[str, dict[str, Any] | None] = {  # the plugin's settings
    STOCK: None,
    "native": {"engine": "native"},
    "executor": {"engine": "executor"},
    # Backwards in halves and every forward a second time, whether or not that saves anything.
    "halves": {"engine": "executor", "policy": "zb-h1", "recompute": True},
}


@dataclass(frozen=True)
class Job:
    """Files below tests/unit_tests, with as many ranks as they take. `select`: pytest's -k."""

    ranks: int
    files: tuple[str, ...]
    select: str = ""
    arms: tuple[str, ...] = (STOCK, "native", "executor")


# Of the tests of determinism those of pipelines, the only ones that train over several stages.
JOBS = (
    Job(
        8,
        (
            "pipeline_parallel/test_schedules.py",
            "pipeline_parallel/test_bridge_communicator.py",
            "pipeline_parallel/test_multimodule_communicator.py",
        ),
    ),
    Job(
        4,
        ("determinism/correctness/test_gpt_model.py", "pipeline_parallel/test_pipeline_layout.py"),
        "pp",
    ),
    Job(4, ("determinism/correctness/test_gpt_model.py",), "pp and not vpp", ("halves",)),
    Job(
        2, ("pipeline_parallel/test_multimodule_schedules.py", "pipeline_parallel/test_helpers.py")
    ),
)


LENT = "tests/unit_tests/determinism"  # there from 0.19 on


def arms_for(release: tuple[int, int]) -> list[str]:
    """Backwards in halves take the executor, which leaves alone a release that it has not seen."""
    return [arm for arm in ARMS if arm != "halves" or release <= NEWEST.release[:2]]


def with_loan(checkout: Path, lender: Path, folder: Path) -> Path:
    """A checkout that has tests of training: a copy, made of links, that borrows what it lacks."""
    if (checkout / LENT).exists():
        return checkout
    for inner in (".", "tests", "tests/unit_tests"):
        (folder / inner).mkdir(parents=True)
        for entry in (checkout / inner).iterdir():
            if entry.name not in (".git", "tests", "unit_tests"):
                (folder / inner / entry.name).symlink_to(entry)
    (folder / LENT).symlink_to(lender / LENT)
    return folder


def run_all(checkout: Path, arm: str, folder: Path, timeout: float = 900) -> Outcomes:
    """All jobs of an arm, one after another: rank 5 has only what ran with six ranks or more."""
    outcomes: Outcomes = [{} for _ in range(max(job.ranks for job in JOBS))]
    for index, job in enumerate(JOBS):
        if arm in job.arms:
            done = run(job, checkout, arm, folder / f"{arm}-{index}", timeout)
            for rank, tests in enumerate(done):
                outcomes[rank].update(tests)
    return outcomes


def run(job: Job, checkout: Path, arm: str, folder: Path, timeout: float) -> Outcomes:
    """One job to its end or its timeout; none of its processes is left."""
    folder.mkdir(parents=True)
    files = [f"tests/unit_tests/{file}" for file in job.files]
    files = [file for file in files if (checkout / file).exists()]
    if not files:
        return []
    command = [sys.executable, "-m", "pytest", "-p", "upstream_plugin", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", "-q", "-k", job.select, *files]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    everywhere = {
        **os.environ, "PYTHONPATH": f"{HERE}:{checkout}:{ROOT}", "PYTHONWARNINGS": "ignore",
        "WORLD_SIZE": str(job.ranks), "LOCAL_WORLD_SIZE": str(job.ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "UPSTREAM_SETTINGS": json.dumps(ARMS[arm]),
    }  # fmt: skip
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(job.ranks):
            out = str(folder / f"rank{rank}.jsonl")
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "UPSTREAM_OUTCOMES": out}
            # Upstream's tests put what they share one folder above what is a rank's own.
            base = f"--basetemp={folder / f'rank{rank}'}"
            processes.append(
                _start([*command, base], checkout, {**everywhere, **own}, f"{out}.log")
            )
        _wait(processes, timeout)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return [read(folder / f"rank{rank}.jsonl") for rank in range(job.ranks)]


def _start(
    command: list[str], folder: Path, environment: dict[str, str], log: str
) -> subprocess.Popen[bytes]:
    with open(log, "wb") as out:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.1))
