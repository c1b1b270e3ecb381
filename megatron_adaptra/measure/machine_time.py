"""The CPU time of all cores of a machine, from /proc/stat."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_STAT = Path("/proc/stat")
_IDLE, _STEAL = (
    (3, 4),
    7,
)  # fields of its first line: idle and waiting for a disk; taken by the host
_COUNTED = 8  # what runs in guests, behind these, is in user time already


class MachineTime(NamedTuple):
    """A machine time holds CPU seconds of all cores since boot: all, not idle, and stolen."""

    total: float
    busy: float
    steal: float

    @classmethod
    def now(cls) -> MachineTime | None:
        """Return the present time; None where the system does not report it."""
        try:
            line = _STAT.read_text(encoding="ascii").partition("\n")[0].split()[1:]
            ticks = [int(word) for word in line[:_COUNTED]]
            unit = os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return None
        if len(ticks) < _COUNTED:
            return None
        total = sum(ticks)
        busy = total - sum(ticks[i] for i in _IDLE)
        return cls(total / unit, busy / unit, ticks[_STEAL] / unit)
