"""An interrupted demo: all ranks stop before the same iteration, and report what they have.

The launcher leaves a file for rank 0, in the folder of the run's data. Rank 0 passes it on before a
barrier, so that behind the barrier all ranks see it, or none does.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from megatron_adaptra.base.log import log_line

LEAST = 3  # iterations that are enough for a report
HAND_OVER = 60.0  # seconds that the ranks get to end an iteration and to write the report
_WORDS = "interrupted: the ranks end their iteration and write a report of what there is"
_ASKED, _PASSED_ON = "stop", "stopped"


def pass_on(data: Path) -> None:
    """Pass on, on rank 0 before a barrier, the launcher's signal, for all to read behind it."""
    asked = data / _ASKED
    if asked.exists():
        os.replace(asked, data / _PASSED_ON)


def asked_by(data: Path) -> str:
    """Return, behind the barrier, the name of the signal that ends the run here, or empty."""
    try:
        return (data / _PASSED_ON).read_text(encoding="ascii")
    except FileNotFoundError:
        return ""


class Stop:
    """A stop handles the launcher's signals: the first one asks the ranks to hand over.

    `data`: the folder of the run's data. `iterations`: how many are over. `signum`: the first
    signal, 0 before it.
    """

    def __init__(self, data: Path) -> None:
        self.iterations, self.signum = 0, 0
        self._data, self._over = data, False
        self._timer = threading.Timer(HAND_OVER, self._again)
        self._timer.daemon = True

    def on_signal(self, signum: int) -> bool:
        """Handle a signal; return whether the ranks will end by themselves, or have to be ended."""
        first = not self.signum
        self.signum = self.signum or signum
        if not first or self.iterations < LEAST:
            return False
        partial = self._data / "stop.partial"
        partial.write_text(signal.Signals(signum).name, encoding="ascii")
        partial.replace(self._data / _ASKED)
        self._timer.start()
        log_line(f"{_WORDS} (once more: all end at once)")
        return True

    def close(self) -> None:
        """Stop the timer, as the ranks have ended."""
        self._over = True
        self._timer.cancel()

    def _again(self) -> None:
        """Repeat the signal to this process, HAND_OVER seconds later, if ranks have not ended."""
        if not self._over:
            os.kill(os.getpid(), self.signum)
