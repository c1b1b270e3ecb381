"""The reader of the log of decisions, which merges the lines of each decision."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FIRST = ("decision", "all-reduce", "sync")  # kinds of lines that begin a decision
_LATER = {"committed": False, "refreshed_ms": None, "measured_ms": None}  # until a line has them


class DecisionReader:
    """A decision reader takes one line after another. `decisions`: oldest first.

    A decision has the fields of its first line, and `committed`, `refreshed_ms` and `measured_ms`:
    False, None and None unless a later line has them.
    """

    def __init__(self) -> None:
        self.decisions: list[dict[str, Any]] = []
        self._known: dict[tuple[str, int], dict[str, Any]] = {}

    def add(self, line: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the decision that begins with `line`; None for a later line.

        Later lines of a decision whose first line is lost are left out. Raises KeyError for a line
        of no decision.
        """
        name = line["job"], line["number"]
        if line["kind"] in FIRST:
            self._known[name] = {**line, **_LATER}
            self.decisions.append(self._known[name])
            return self._known[name]
        if name in self._known:
            self._known[name].update({key: line[key] for key in _LATER.keys() & line.keys()})
        return None


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the decisions in the file at `path`, see DecisionReader.

    Raises OSError, ValueError or KeyError for a file that is no such log.
    """
    reader = DecisionReader()
    for line in path.read_text(encoding="utf-8").splitlines():
        reader.add(json.loads(line))
    return reader.decisions
