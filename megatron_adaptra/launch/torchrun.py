"""Ranks on this machine, under torchrun; none outlives the call."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

from megatron_adaptra.base.errors import Interrupted
from megatron_adaptra.base.package import command, script
from megatron_adaptra.base.processes import started

_AGENT = "megatron_adaptra.launch.agent"
_GRACE = 25.0  # seconds that torchrun gets to end its ranks
LONGEST_LINE = 2**16  # bytes; what goes on longer comes in parts


def run_ranks(
    count: int,
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
    on_signal: Callable[[int], bool] = lambda _: False,
) -> int:
    """Run `count` ranks of our `module` with its `arguments`; return torchrun's exit status.

    `environment`: their variables. `on_line` gets all that they print. SIGTERM and SIGINT end
    them, and raise Interrupted, unless `on_signal` of the signal is true: they end by themselves.
    """
    ended_by: list[int] = []
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ExitStack() as stack:
        # The agent removes it, too, for this process may be killed.
        tmp = TemporaryDirectory(prefix="adaptra-", ignore_cleanup_errors=True)
        agent = command(_AGENT, "--tmp", stack.enter_context(tmp), "--standalone")
        words = [*agent, "--nproc-per-node", str(count), *script(module, *arguments)]
        process = stack.enter_context(started(words, _GRACE, env=environment, **streams))

        def handle(signum: int, _: Any) -> None:
            if not on_signal(signum):
                ended_by.append(signum)
                process.terminate()

        before = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            while process.stdout and (line := process.stdout.readline(LONGEST_LINE)):
                on_line(line.decode(errors="replace"))
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if ended_by:
        raise Interrupted(ended_by[0], "all ranks have ended")
    return status
