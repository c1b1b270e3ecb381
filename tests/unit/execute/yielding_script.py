"""A process of test_yielding.py: a training that computes, on a core that its child uses, too.

Argument: the core. Prints JSON: what was found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from megatron_adaptra.execute.shares.adaptive import Yielding
from megatron_adaptra.measure.core_wait import CoreWait

WORK = 0.05  # CPU seconds of an iteration
BUSY = "while True: pass"


def iteration(waited: CoreWait) -> tuple[float, float]:
    """Seconds that its thread has waited for a core, and that it took."""
    began, queued, until = time.monotonic(), waited(), time.thread_time() + WORK
    while time.thread_time() < until:
        pass
    after = waited()
    assert queued is not None
    assert after is not None
    return after - queued, time.monotonic() - began


def main() -> None:
    os.sched_setaffinity(0, {int(sys.argv[1])})
    waited, yielding = CoreWait(), Yielding()
    with subprocess.Popen([sys.executable, "-c", BUSY]) as child:
        try:
            for _ in range(100):
                if yielding.use is None:
                    yielding.ended(*iteration(waited))
            found = {
                "use": yielding.use, "child": os.getpriority(os.PRIO_PROCESS, child.pid),
                "own": os.getpriority(os.PRIO_PROCESS, 0),
            }  # fmt: skip
        finally:
            child.kill()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
