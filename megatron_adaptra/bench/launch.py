"""Starts the ranks of a measurement, on this machine or in a laboratory of slow links.

If torchrun has started this process, it is one of the ranks, and starts none.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from typing import Any

from megatron_adaptra.base.errors import AdaptraError, BadInput, MissingPackage
from megatron_adaptra.base.package import command
from megatron_adaptra.base.units import whole
from megatron_adaptra.bench.options import RESULT, Options
from megatron_adaptra.launch.failures import reason
from megatron_adaptra.launch.torchrun import run_ranks
from megatron_adaptra.netlab.lab import Lab
from megatron_adaptra.transport.engine.bindings import missing

_WORKER = "megatron_adaptra.bench.worker"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what it sets for a rank
# Of the ranks: one thread each, and no warnings of torch among the rows that they print.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


def from_torchrun() -> tuple[int, int] | None:
    """This rank and the number of ranks, if torchrun has started this process; else None.

    Raises BadInput for variables that torchrun does not set so.
    """
    if not all(os.environ.get(name) for name in _TORCHRUN):
        return None
    found = []
    for name in ("RANK", "WORLD_SIZE"):
        try:
            found.append(whole(os.environ[name]))
        except ValueError:
            allowed = "it has to be a whole number, as torchrun sets it; unset it to measure here"
            raise BadInput(name, os.environ[name], allowed) from None
    rank, ranks = found
    if not 0 <= rank < ranks:
        raise BadInput(
            "RANK", rank, f"it has to be 0 to WORLD_SIZE - 1 ({ranks - 1}), as torchrun sets it"
        )
    return rank, ranks


def measure(options: Options, say: Callable[[str], None]) -> list[dict[str, Any]] | None:
    """The rows of the measurement, a JSON object each; None under torchrun on ranks above 0.

    Args:
        options: what to measure.
        say: prints a line for the user beside the rows.

    Raises:
        MissingPackage: torch is not installed.
        AdaptraError: the engine is missing, a rank fails, or a laboratory cannot be made.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingPackage("adaptra bench", ["torch"], "torch")
    if why := missing():
        raise AdaptraError(f"there is no engine to measure: {why}")
    if from_torchrun():
        from megatron_adaptra.bench.worker import measure_as_rank

        return measure_as_rank(options)
    environment = {**_ENVIRONMENT, **os.environ}
    rows: list[dict[str, Any]] = []
    lines: list[str] = []  # all else that the ranks print: where one fails, it has the reason

    def on_line(line: str) -> None:
        if line.startswith(RESULT):
            rows.extend(json.loads(line.removeprefix(RESULT)))
        elif line.strip():
            lines.append(line.strip())

    if options.rules:
        status = _in_lab(options, environment, on_line, say)
    else:
        status = run_ranks(options.ranks, _WORKER, [options.dump()], environment, on_line)
    if status or not rows:
        raise AdaptraError(reason(lines, status))
    return rows


def _in_lab(
    options: Options,
    environment: dict[str, str],
    on_line: Callable[[str], None],
    say: Callable[[str], None],
) -> int:
    """Run one rank per host of a laboratory; returns the highest exit status."""
    with Lab(options.ranks, options.rules) as lab:
        for measured in lab.measure():
            if measured.fault:
                link = f"{measured.rule.source}>{measured.rule.target}"
                say(f"this machine does not keep link {link}: {measured.fault}")

        def of_host(_: int, line: bytes) -> None:
            on_line(line.decode(errors="replace"))

        return max(lab.run(command(_WORKER, options.dump()), environment, of_host))
