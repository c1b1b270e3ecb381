"""Ranks on this machine, under torchrun; none outlives the call."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_adaptra.errors import AdaptraError
from megatron_adaptra.package import script
from megatron_adaptra.processes import started

_GRACE = 25.0  # seconds that torchrun gets to end its ranks
LONGEST_LINE = 2**16  # bytes; what goes on longer comes in parts


def run_ranks(
    count: int,
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
) -> int:
    """Run `count` ranks of our `module` with its `arguments`; torchrun's exit status.

    `environment`: their variables. `on_line` gets all that they print. SIGTERM and SIGINT end
    them, and raise AdaptraError.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(count), *script(module, *arguments),
    ]  # fmt: skip
    terminated = threading.Event()
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with started(command, _GRACE, env=environment, **streams) as process:

        def on_signal(*_: Any) -> None:
            terminated.set()
            process.terminate()

        before = {s: signal.signal(s, on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            while process.stdout and (line := process.stdout.readline(LONGEST_LINE)):
                on_line(line.decode(errors="replace"))
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if terminated.is_set():
        raise AdaptraError("interrupted; all ranks have ended")
    return status
