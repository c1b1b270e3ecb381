"""Processes of a part: each a rank, all with one time-out, none left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_check.target import HERE, Target

from megatron_adaptra.base.processes import started

GRACE = 5.0  # seconds between SIGTERM and SIGKILL
RESULT = "RESULT "
LAST_WORDS = 300  # characters
BEFORE, AFTER, END = 1200, 400, 1200  # of the output around the first error, and at its end
NAMES_ERROR = re.compile(r"\w(Error|Failed|Lost|Exception)\b")


class Failed(RuntimeError):
    """A process has failed, or was late; the text names it. `log`: what it printed last, and where
    its first error is."""

    def __init__(self, text: str, log: str = "") -> None:
        super().__init__(text)
        self.log = log


class Deadline:
    """When a part has to be over. `seconds`: from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def begin(self, name: str) -> None:
        """Raises Failed if there is no time left to."""
        if not self.left:
            raise Failed(f"{name}: not begun: the part's {self.seconds:g} s are over")


def run_ranks(
    target: Target, job: str, work: Path, deadline: Deadline, *, ranks: int = 1,
    options: Mapping[str, Any] | None = None, **machine: object,
) -> list[Any]:  # fmt: skip
    """What `on_rank` of the module `job` returned on each rank; `options` are its arguments.

    `machine`: see Target.environment. Raises Failed.
    """
    folder = work / f"{job}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    given = json.dumps({
        "job": job, "ranks": ranks, "options": dict(options or {}), "gpus": target.gpus,
        "folder": str(folder), "seconds": deadline.left,
    })  # fmt: skip
    command = [sys.executable, str(HERE / "rank.py"), given]
    environment = target.environment(**machine)
    with contextlib.ExitStack() as stack:
        texts = [stack.enter_context((folder / f"{i}.txt").open("w+")) for i in range(ranks)]
        processes = [
            # Each in a session of its own; the last one started ends first.
            stack.enter_context(
                started(command, GRACE, env={**environment, "RANK": str(i), "LOCAL_RANK": str(i)},
                        stdin=subprocess.DEVNULL, stdout=texts[i], stderr=subprocess.STDOUT)
            )
            for i in range(ranks)
        ]  # fmt: skip
        _await(processes, texts, job, deadline)
        return [_result(text, f"{job}, rank {i}") for i, text in enumerate(texts)]


def run_command(
    command: Sequence[str], name: str, environment: Mapping[str, str], deadline: Deadline,
    output: Path,
) -> str:  # fmt: skip
    """What a command printed; it goes to `output`. Raises Failed, also with no time left for it."""
    with output.open("w+") as text:
        deadline.begin(name)
        with started(command, GRACE, env=dict(environment), stdin=subprocess.DEVNULL,
                     stdout=text, stderr=subprocess.STDOUT) as process:  # fmt: skip
            _await([process], [text], name, deadline)
        text.seek(0)
        return text.read()


def _await(processes: list[Any], texts: list[Any], name: str, deadline: Deadline) -> None:
    """Until all have ended well; the first that fails ends the wait."""
    with contextlib.ExitStack() as stack:
        open_ones = {os.pidfd_open(process.pid): i for i, process in enumerate(processes)}
        for descriptor in open_ones:
            stack.callback(os.close, descriptor)
        while open_ones:
            ended, _, _ = select.select(list(open_ones), [], [], deadline.left)
            for i in map(open_ones.pop, ended):
                if status := processes[i].wait():
                    words, log = _last(texts[i])
                    raise Failed(f"{name}, rank {i}: exit status {status}: {words}", log)
            if open_ones and not ended:
                last = {i: _last(texts[i]) for i in open_ones.values()}
                late = ", ".join(f"rank {i} ({words})" for i, (words, _) in last.items())
                log = "".join(log for _, log in last.values())
                raise Failed(f"{name}: not done after {deadline.seconds:g} s: {late}", log)


def _last(text: Any) -> tuple[str, str]:
    """The first line that names an error, else the last one; and what to read of the output."""
    text.seek(0)
    output = text.read()
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if NAMES_ERROR.search(line) and "ChildFailed" not in line]
    words = errors[:1] or lines[-1:] or ["it printed nothing"]  # the first error is the cause
    return words[0][:LAST_WORDS], _excerpt(output, words[0] if errors else "")


def _excerpt(output: str, error: str) -> str:
    """The end of the output, and what is around its first `error`: a launcher writes pages more."""
    end = max(0, len(output) - END)
    at = output.find(error) if error else len(output)
    if at + AFTER >= end:
        return output[max(0, min(end, at - BEFORE)) :]
    return f"{output[max(0, at - BEFORE) : at + len(error) + AFTER]}\n[...]\n{output[end:]}"


def _result(text: Any, who: str) -> Any:
    text.seek(0)
    for line in reversed(text.read().splitlines()):
        if line.startswith(RESULT):
            return json.loads(line[len(RESULT) :])
    raise Failed(f"{who}: ended without a result")
