"""The report of one rank of a data-parallel group on one reduction of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_adaptra.measure.report import read_report
from megatron_adaptra.plan.reductions.figures import Buffers

VERSION = 5


@dataclass(frozen=True)
class ReductionReport:
    """A reduction report holds one rank's seconds; ranks are those of the group, from 0.

    `seen`: by rank, how much later than this one its first gradients were ready, with what its
    message took; below 0 for earlier ones. `rates`: by rank, bytes per second that the path from it
    was measured to pass, where it was. `nbytes`: bytes of all gradients. `seconds`: from the moment
    when the first gradients were ready here to the end of the reduction; `period`: to that moment
    from the same one of the iteration before; `between`: to that moment from the end of the
    reduction before; `queued`: in `period`, in which its training thread waited for a core. The
    four are None where they are not known.
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
    queued: float | None = None

    @property
    def exposed(self) -> float | None:
        """The seconds from its last gradients to its end; None where that is not known."""
        return None if self.seconds is None else max(0.0, self.seconds - self.buffers.overlap)

    def to_json(self) -> dict[str, Any]:
        """Return an object for json.dump, which `from_json` reads."""
        return {"version": VERSION, **vars(self), "buffers": vars(self.buffers)}

    @classmethod
    def from_json(cls, data: object) -> ReductionReport:
        """Return the report of which `to_json` made `data`. Raises BadMessage, as StageReport."""
        return read_report(cls, data, VERSION)
