"""What one rank reports of one iteration of its data-parallel replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_adaptra.telemetry.host_use import HostUse
from megatron_adaptra.telemetry.report import read_report

VERSION = 2


@dataclass(frozen=True)
class SyncReport:
    """Times are seconds, ranks those of the job.

    `replica`: that this rank belongs to. `microbatches`: that the replica ran. `seconds`: from the
    iteration's first microbatch to the end of the last one here, before other replicas are waited
    for. `period`: from the beginning of the iteration before to that of this one; None where that
    is not known. `use`: of its host, while it waits for a core there.
    """

    rank: int
    replica: int
    iteration: int
    microbatches: int
    seconds: float
    period: float | None = None
    use: HostUse | None = None

    def to_json(self) -> dict[str, Any]:
        """An object for json.dump, which `from_json` reads."""
        return {"version": VERSION, **vars(self)}

    @classmethod
    def from_json(cls, data: object) -> SyncReport:
        """What `to_json` has made of a report: `data`. BadMessage as for StageReport."""
        return read_report(cls, data, VERSION)
