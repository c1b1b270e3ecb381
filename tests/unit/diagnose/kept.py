"""A book whose lines and events are kept, as rank 0 of a job would write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_adaptra.diagnose.book import FindingBook
from megatron_adaptra.diagnose.finding import Place
from megatron_adaptra.diagnose.opened import OpenFindings

Brief = tuple[str, str, list[int], int, int | None]


class Kept:
    """A Kept keeps the lines that `books` hand in, and their events.

    `holds`: findings may be held, until a test asks for them.
    """

    def __init__(self, holds: bool = False) -> None:
        self._holds = holds
        self.lines: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.open = OpenFindings()
        self.lost = False  # what books hand in

    def book(self, by: int = 0) -> FindingBook:
        return FindingBook(by, self._take)

    def brief(self) -> list[Brief]:
        """By event: state, kind, ranks, since, until."""
        return [
            (e["state"], e["what"], [place["rank"] for place in e["where"]], e["since"], e["until"])
            for e in self.events
        ]

    def _take(self, line: str, event: Mapping[str, Any]) -> None:
        if self.lost:
            return
        written = [self.open.see(line, event)]
        if not self._holds:
            written += self.open.unexplained(0.0, last=True)
        for line, seen in written:
            if line and seen is not None:
                self.lines.append(line)
                self.events.append(dict(seen))


def places(replicas: int, stages: int) -> list[tuple[Place, ...]]:
    """By replica, those of its workers; ranks replica by replica."""
    return [
        tuple(Place(s, r * stages + s, f"host{r}", "", f"{r}.{s}") for s in range(stages))
        for r in range(replicas)
    ]
