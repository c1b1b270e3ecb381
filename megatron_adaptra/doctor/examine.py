"""Runs the checks, each part in a process of its own: what they load may hang or end it.

As a command, with PART as its argument: print a part's findings, one JSON
object per line, as they are found.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from megatron_adaptra.doctor.engine import engine
from megatron_adaptra.doctor.finding import Finding, fail
from megatron_adaptra.doctor.gpus import gpus
from megatron_adaptra.doctor.machine import machine
from megatron_adaptra.doctor.software import software
from megatron_adaptra.errors import line_of
from megatron_adaptra.package import command
from megatron_adaptra.processes import started

PATIENCE = 60.0  # seconds for a part: to import torch and Megatron from a cold disk takes half
_GRACE = 1.0
PARTS: Mapping[str, Callable[[], Iterator[Finding]]] = {
    "machine": machine, "software": software, "engine": engine, "GPUs": gpus,
}  # fmt: skip


class Part(NamedTuple):
    """A part of the machine, and what was found there."""

    name: str
    findings: list[Finding]


def examine(parts: Iterable[str] = tuple(PARTS), patience: float = PATIENCE) -> Iterator[Part]:
    """Findings of `parts`, side by side; each has `patience`, in seconds."""
    with ExitStack() as stack:
        running = []
        for name in parts:
            out, err = stack.enter_context(TemporaryFile()), stack.enter_context(TemporaryFile())
            words, streams = command(__spec__.name, name), {"stdout": out, "stderr": err}
            process = stack.enter_context(
                started(words, _GRACE, stdin=subprocess.DEVNULL, **streams)
            )
            running.append((name, process, out, err))
        for name, process, out, err in running:
            try:
                status: int | None = process.wait(patience)
            except subprocess.TimeoutExpired:
                status = None
            yield Part(name, [*_read(out), *_end(name, status, patience, _last_line(err))])


def _read(out: Any) -> Iterator[Finding]:
    out.seek(0)
    for line in out.read().decode(errors="replace").splitlines():
        try:
            yield Finding.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError):
            continue  # somebody else's print, or half a line


def _last_line(err: Any) -> str:
    err.seek(0)
    lines = err.read()[-4000:].decode(errors="replace").split("\n")
    return line_of(next((line for line in reversed(lines) if line.strip()), "it said nothing"))


def _end(name: str, status: int | None, patience: float, said: str) -> Iterator[Finding]:
    """What it means how a part's process has ended."""
    remedy = f"{shlex.join(command(__spec__.name, name))} shows where"
    if status is None:
        yield fail(name, f"not examined to the end: no answer in {patience:g} s", remedy)
    elif status < 0:
        ended = signal.Signals(-status).name
        yield fail(name, f"not examined to the end: {ended}: {said}", remedy)
    elif status:
        yield fail(name, f"not examined to the end: {said}", remedy)


def main(words: list[str]) -> None:
    """Print the findings of the part that `words` name."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    for finding in PARTS[words[0]]():
        print(json.dumps(finding.to_json()), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
