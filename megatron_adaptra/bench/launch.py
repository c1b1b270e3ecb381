"""Starts the ranks of a measurement, on this machine or in a laboratory of slow links."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from megatron_adaptra.bench.options import RESULT, Options
from megatron_adaptra.errors import AdaptraError
from megatron_adaptra.failures import reason
from megatron_adaptra.netlab.lab import Lab
from megatron_adaptra.package import command
from megatron_adaptra.torchrun import run_ranks
from megatron_adaptra.transport.engine.native import missing

_WORKER = "megatron_adaptra.bench.worker"
# One thread per rank, and no words of torch among the rows.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


def measure(options: Options, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows. `say`: takes what the user should know beside them.

    Raises AdaptraError where the engine is missing, a rank fails, or a laboratory cannot be made.
    """
    if why := missing():
        raise AdaptraError(f"there is no engine to measure: {why}")
    environment = {**_ENVIRONMENT, **os.environ}
    found: list[dict[str, Any]] = []
    lines: list[str] = []

    def on_line(line: str) -> None:
        if line.startswith(RESULT):
            found.extend(json.loads(line.removeprefix(RESULT)))
        elif line.strip():
            lines.append(line.strip())

    if options.link:
        status = _in_lab(options, environment, on_line, say)
    else:
        status = run_ranks(options.ranks, _WORKER, [options.dump()], environment, on_line)
    if status or not found:
        raise AdaptraError(reason(lines, status))
    return found


def _in_lab(
    options: Options,
    environment: dict[str, str],
    on_line: Callable[[str], None],
    say: Callable[[str], None],
) -> int:
    """One rank per host."""
    with Lab(options.ranks, options.rules) as lab:
        for measured in lab.measure():
            if measured.fault:
                link = f"{measured.rule.source}>{measured.rule.target}"
                say(f"this machine does not keep link {link}: {measured.fault}")

        def of_host(_: int, line: bytes) -> None:
            on_line(line.decode(errors="replace"))

        return max(lab.run(command(_WORKER, options.dump()), environment, of_host))
