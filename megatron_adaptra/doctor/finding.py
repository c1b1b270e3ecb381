"""Findings of the doctor's checks, each one line of its output, and files that the kernel shows."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Status(enum.Enum):
    """A status rates a finding: a training runs; runs slower or without a part; cannot run."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """A finding reports one check, in one line of the doctor's output.

    Args:
        status: whether a training can run.
        what: the part of the machine or the software that was examined.
        says: what was found there.
        remedy: the command that mends it, or what to do; empty where nothing has to be done.
    """

    status: Status
    what: str
    says: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the object of `adaptra doctor --json`, which has the status as `verdict`."""
        words = self._asdict()
        return {"verdict": words.pop("status").value, **words}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Finding:
        """Read a finding from `data` of `to_json`. Raises ValueError, KeyError or TypeError."""
        what, says, remedy = (str(data[key]) for key in ("what", "says", "remedy"))
        return cls(Status(data["verdict"]), what, says, remedy)


def ok(what: str, says: str) -> Finding:
    """Return the finding that `what` is in order, as it `says`."""
    return Finding(Status.OK, what, says)


def warn(what: str, says: str, remedy: str) -> Finding:
    """Return the finding that `what`, as it `says`, slows or limits a training until `remedy`."""
    return Finding(Status.WARN, what, says, remedy)


def fail(what: str, says: str, remedy: str) -> Finding:
    """Return the finding that `what`, as it `says`, prevents a training until the `remedy`."""
    return Finding(Status.FAIL, what, says, remedy)


def text_of(file: Path) -> str:
    """Return the text of a `file`, such as an attribute in sysfs; empty where there is none."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def counted(folder: Path, counters: Iterable[str]) -> str:
    """Return those of the `counters`, files in a `folder`, that are above 0, with their numbers."""
    found = ((name, text_of(folder / name)) for name in counters)
    wrong = [f"{name} {int(text)}" for name, text in found if text.isdecimal() and int(text)]
    return ", ".join(wrong)
