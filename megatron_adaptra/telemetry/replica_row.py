"""One iteration of all data-parallel replicas."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low

LATE = 1.1  # times as long as others for a microbatch, from which a replica is looked at


@dataclass(frozen=True)
class ReplicaRow:
    """An `iteration`, which `took` so many seconds from start to start, if that is known.

    `microbatches`: by replica, how many it ran. `seconds`: from its first microbatch to the end of
    its last one, before other replicas are waited for, of the last of its ranks.
    """

    iteration: int
    microbatches: tuple[int, ...]
    seconds: tuple[float, ...]
    took: float | None = None

    def late(self, replica: int) -> bool:
        """Whether a `replica` takes longer for a microbatch than others do."""
        each = [s / count for s, count in zip(self.seconds, self.microbatches, strict=True)]
        return each[replica] >= LATE * median_low(each)
