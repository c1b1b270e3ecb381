"""What one rank of a data-parallel group reports of one reduction of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_adaptra.ir.buffers import Buffers
from megatron_adaptra.measure.report import read_report

VERSION = 4


@dataclass(frozen=True)
class ReductionReport:
    """Seconds everywhere; ranks are those of the group, from 0.

    `seen`: by rank, how much later than this one its first gradients were ready, with what its
    message took; below 0 for earlier ones. `rates`: bytes per second that the path from a rank was
    measured to pass, where it was. `nbytes`: of all gradients. `seconds`: from when the first ones
    were ready here to the end; `period`: from the same moment of the iteration before; `between`:
    from the end of that one's reduction. None where that is not known.
    """

    rank: int
    iteration: int
    nbytes: int
    seen: Mapping[int, float] = field(default_factory=dict)
    rates: Mapping[int, float] = field(default_factory=dict)
    seconds: float | None = None
    period: float | None = None
    between: float | None = None
    buffers: Buffers = Buffers()

    @property
    def sender(self) -> int:
        """Its rank."""
        return self.rank

    @property
    def exposed(self) -> float | None:
        """Seconds that its end comes after its last gradients; None where that is not known."""
        return None if self.seconds is None else max(0.0, self.seconds - self.buffers.overlap)

    def to_json(self) -> dict[str, Any]:
        """An object for json.dump, which `from_json` reads."""
        return {"version": VERSION, **vars(self), "buffers": vars(self.buffers)}

    @classmethod
    def from_json(cls, data: object) -> ReductionReport:
        """What `to_json` has made of a report: `data`. BadMessage as for StageReport."""
        return read_report(cls, data, VERSION)
