"""What one rank of a data-parallel group reports of one reduction of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_adaptra.telemetry.report import read_report

VERSION = 2


@dataclass(frozen=True)
class ReductionReport:
    """Seconds everywhere; ranks are those of the group, from 0.

    `seen`: by rank, how much later than this one its first gradients were ready, with what its
    message took; below 0 for earlier ones. `rates`: bytes per second that the path from a rank was
    measured to pass, where it was. `nbytes`: of all gradients. `seconds`: from when the first ones
    were ready here to the end; `period`: to the same moment of the iteration before. None where
    that is not known. `overlap`: from the first to the last ones that were ready, while others were
    reduced; 0 where nothing overlaps. `last`: bytes of those last ones. `buffers`: how many are
    reduced, one by one; `gathers`: of shards, all-gathers afterwards that no forward hides.
    """

    rank: int
    iteration: int
    nbytes: int
    seen: Mapping[int, float] = field(default_factory=dict)
    rates: Mapping[int, float] = field(default_factory=dict)
    seconds: float | None = None
    period: float | None = None
    overlap: float = 0.0
    last: int = 0
    buffers: int = 1
    gathers: int = 1

    @property
    def exposed(self) -> float | None:
        """Seconds that its end comes after its last gradients; None where that is not known."""
        return None if self.seconds is None else max(0.0, self.seconds - self.overlap)

    def to_json(self) -> dict[str, Any]:
        """An object for json.dump, which `from_json` reads."""
        return {"version": VERSION, **vars(self)}

    @classmethod
    def from_json(cls, data: object) -> ReductionReport:
        """What `to_json` has made of a report: `data`. BadMessage as for StageReport."""
        return read_report(cls, data, VERSION)
