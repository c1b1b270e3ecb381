"""What a rank of a late replica reports of its host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_adaptra.telemetry.host_use import HostUse
from megatron_adaptra.telemetry.report import read_report

VERSION = 1


@dataclass(frozen=True)
class HostReport:
    """`rank`: of the job. `replica`: that it belongs to. `use`: of its host up to `iteration`.

    A rank has a use to report only while its training waits for a core.
    """

    rank: int
    replica: int
    iteration: int
    use: HostUse

    def to_json(self) -> dict[str, Any]:
        """An object for json.dump, which `from_json` reads."""
        return {"version": VERSION, **vars(self)}

    @classmethod
    def from_json(cls, data: object) -> HostReport:
        """What `to_json` has made of a report: `data`. BadMessage as for StageReport."""
        return read_report(cls, data, VERSION)
