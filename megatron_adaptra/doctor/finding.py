"""What a check has found."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple


class Verdict(enum.Enum):
    """How good it is for a training."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """One line of the doctor's.

    `what`: it is about. `says`: what was found there. `remedy`: the command that mends it, or what
    to do; empty where nothing has to be done.
    """

    verdict: Verdict
    what: str
    says: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """As `adaptra doctor --json` prints it."""
        return {**self._asdict(), "verdict": self.verdict.value}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Finding:
        """From `data`, which `to_json` has made. Raises ValueError, KeyError or TypeError."""
        return cls(
            Verdict(data["verdict"]), str(data["what"]), str(data["says"]), str(data["remedy"])
        )


def ok(what: str, says: str) -> Finding:
    """`what` is as it has to be, as it `says`."""
    return Finding(Verdict.OK, what, says)


def warn(what: str, says: str, remedy: str) -> Finding:
    """`what`, as it `says`, makes a training slower, or lacks a part; mended by `remedy`."""
    return Finding(Verdict.WARN, what, says, remedy)


def fail(what: str, says: str, remedy: str) -> Finding:
    """No training with the plugin, for `what` is as it `says`, until the `remedy`."""
    return Finding(Verdict.FAIL, what, says, remedy)
