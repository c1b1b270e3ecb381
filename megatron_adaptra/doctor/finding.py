"""What a check of the doctor has found: one line of its output."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple


class Status(enum.Enum):
    """Whether a training can run so: yes; yes, but slower or without a part; no."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """One line of the doctor's output.

    Args:
        status: whether a training can run so.
        what: the part of the machine or the software that was examined.
        says: what was found there.
        remedy: the command that mends it, or what to do; empty where nothing has to be done.
    """

    status: Status
    what: str
    says: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """As `adaptra doctor --json` prints it: there the key of the status is `verdict`."""
        words = self._asdict()
        return {"verdict": words.pop("status").value, **words}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Finding:
        """From `data`, which `to_json` has made. Raises ValueError, KeyError or TypeError."""
        what, says, remedy = (str(data[key]) for key in ("what", "says", "remedy"))
        return cls(Status(data["verdict"]), what, says, remedy)


def ok(what: str, says: str) -> Finding:
    """`what` is as it has to be, as it `says`."""
    return Finding(Status.OK, what, says)


def warn(what: str, says: str, remedy: str) -> Finding:
    """`what`, as it `says`, makes a training slower, or lacks a part; mended by `remedy`."""
    return Finding(Status.WARN, what, says, remedy)


def fail(what: str, says: str, remedy: str) -> Finding:
    """No training with the plugin, for `what` is as it `says`, until the `remedy`."""
    return Finding(Status.FAIL, what, says, remedy)
