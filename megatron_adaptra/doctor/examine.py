"""The run of all checks, each part in a process of its own: libraries may hang or end it.

Called as a command with PART as its argument, the module prints a part's findings, one JSON
object per line, as they are found, and END once it has found all.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, NamedTuple

from megatron_adaptra.base.errors import line_of
from megatron_adaptra.base.package import command
from megatron_adaptra.base.processes import cpu_seconds, ending_on_sigterm, started
from megatron_adaptra.doctor.engine import engine
from megatron_adaptra.doctor.finding import Finding, fail
from megatron_adaptra.doctor.gpus import gpus
from megatron_adaptra.doctor.machine import machine
from megatron_adaptra.doctor.software import software

# Seconds that a part may compute, and seconds without progress; time that other processes take
# does not count as computing. To import torch and Megatron takes a tenth.
PATIENCE = 60.0
_AT_MOST = 10  # times as long in all, by the clock on the wall
_LOOK = 0.5  # seconds between two looks at what a part has done
_GRACE = 1.0
END = json.dumps("end")  # the last line of a part that has been examined to the end
PARTS: Mapping[str, Callable[[], Iterator[Finding]]] = {
    "machine": machine, "software": software, "engine": engine, "GPUs": gpus,
}  # fmt: skip


class Part(NamedTuple):
    """A part of the machine, and what was found there."""

    name: str
    findings: list[Finding]


def examine(parts: Iterable[str] = tuple(PARTS), patience: float = PATIENCE) -> Iterator[Part]:
    """Examine `parts` at the same time; each has `patience`, in seconds, see PATIENCE."""
    with ExitStack() as stack:
        running = []
        # Some packages that the parts import make folders there.
        tmp = TemporaryDirectory(prefix="adaptra-", ignore_cleanup_errors=True)
        environment = {**os.environ, "TMPDIR": stack.enter_context(tmp)}
        stack.enter_context(ending_on_sigterm())
        for name in parts:
            out, err = stack.enter_context(TemporaryFile()), stack.enter_context(TemporaryFile())
            words, streams = command(__spec__.name, name), {"stdout": out, "stderr": err}
            process = stack.enter_context(
                started(words, _GRACE, stdin=subprocess.DEVNULL, env=environment, **streams)
            )
            running.append((name, process, out, err))
        for name, process, out, err in running:
            late = _wait(process, out, patience)
            lines = _text(out).splitlines()
            findings = [*_read(lines)]
            if END not in lines:  # after END a hang or a crash does not matter
                findings.append(_cut_short(name, process.returncode, late, _last_line(err)))
            yield Part(name, findings)


def _wait(process: subprocess.Popen[Any], out: Any, patience: float) -> str:
    """Wait for the process; return empty text, or why it is given up after its `patience`."""
    began = moved = time.monotonic()
    before = (0.0, 0)
    while True:
        try:
            process.wait(min(_LOOK, patience))
            return ""
        except subprocess.TimeoutExpired:
            now, done = time.monotonic(), (cpu_seconds(process.pid), os.fstat(out.fileno()).st_size)
        if done != before:
            moved, before = now, done
        if done[0] > patience:
            return f"no end after {patience:g} s of computing"
        if now - moved > patience:
            return f"no answer in {patience:g} s"
        if now - began > _AT_MOST * patience:
            return f"no end in {_AT_MOST * patience:g} s"


def _text(file: Any) -> str:
    """Return all text of the file, whose end the process may still be writing."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _read(lines: Iterable[str]) -> Iterator[Finding]:
    for line in lines:
        try:
            yield Finding.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError):
            continue  # the end, or half a line


def _last_line(err: Any) -> str:
    lines = _text(err)[-4000:].split("\n")
    return line_of(next((line for line in reversed(lines) if line.strip()), "it printed nothing"))


def _cut_short(name: str, status: int | None, late: str, last: str) -> Finding:
    """Return the finding on a part's process that ended too soon, with `status`, or is `late`."""
    remedy = f"{shlex.join(command(__spec__.name, name))} shows where"
    if not late and status is not None and status < 0:
        last = f"{signal.Signals(-status).name}: {last}"
    return fail(name, f"not examined to the end: {late or last}", remedy)


def main(words: list[str]) -> None:
    """Print the findings of the part that `words` name."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to standard error
    for finding in PARTS[words[0]]():
        print(json.dumps(finding.to_json()), file=out, flush=True)
    print(END, file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
