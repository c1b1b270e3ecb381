"""Running scripts over the fake machine: each rank a process, each printing one line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fakes.cuda import building, machine

from megatron_adaptra.base.processes import die_with_parent

HERE = Path(__file__).parent
PATIENCE = 120.0  # seconds; against hanging
Ranks = list[subprocess.Popen[str]]


def _start(words: list[str], rank: int, more: Mapping[str, str]) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(HERE.parents[1] / "support"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "RANK": str(rank), "PYTHONPATH": path, **more}
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, preexec_fn=die_with_parent,
    )  # fmt: skip


def _begin(
    script: str,
    words: tuple[str, ...],
    ranks: int,
    options: Mapping[str, Any],
    environments: Sequence[Mapping[str, str]] = (),
) -> Ranks:
    building.build()  # not within the time limit of a run
    given = [w for key, v in options.items() for w in (f"--{key.replace('_', '-')}", str(v))]
    command = [sys.executable, str(machine.__file__), *given]
    command += [sys.executable, str(HERE / script), uuid.uuid4().hex, str(ranks), *words]
    return [_start(command, r, environments[r] if environments else {}) for r in range(ranks)]


def _end(ranks: Ranks) -> None:
    for process in ranks:
        process.kill()
        process.communicate()


def run_script(
    script: str,
    *words: str,
    ranks: int = 1,
    timeout: float = PATIENCE,
    environments: Sequence[Mapping[str, str]] = (),
    **options: Any,
) -> list[Any]:
    """What each rank of a script of this folder printed; options of the machine with `_` for `-`.

    A script gets a name for its communicators and the number of ranks, then `words`. All ranks
    have to end. `environments`: variables of each rank, besides those of this process.
    """
    running = _begin(script, words, ranks, options, environments)
    found = []
    try:
        for process in running:
            text, error = process.communicate(timeout=timeout)
            assert process.returncode == 0, f"rank {len(found)}: {error[-4000:]}"
            found.append(json.loads(text.splitlines()[-1]))
    finally:
        _end(running)
    return found


def first_report(script: str, *words: str, ranks: int, **options: Any) -> str:
    """What rank 0 of a script that hangs reports. The ranks are killed then."""
    running = _begin(script, words, ranks, options)
    late = threading.Timer(PATIENCE, running[0].kill)
    late.start()
    lines = []
    try:
        errors = running[0].stderr
        assert errors is not None
        for line in errors:
            lines.append(line)
            if line == "\n":  # a report ends with an empty line
                break
    finally:
        late.cancel()
        _end(running)
    return "".join(lines)
