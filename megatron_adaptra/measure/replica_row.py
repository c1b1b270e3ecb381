"""One iteration of all data-parallel replicas."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_adaptra.measure.host_use import HostUse


@dataclass(frozen=True)
class ReplicaRow:
    """A row holds one `iteration`, which `took` so many seconds from start to start, if known.

    `microbatches`: by replica, how many it ran. `seconds`: by replica, from its first microbatch to
    the end of its last one on its last rank, before other replicas are waited for. `uses`: by
    replica, of the host of its rank that waits most for a core; None if none does.
    """

    iteration: int
    microbatches: tuple[int, ...]
    seconds: tuple[float, ...]
    uses: tuple[HostUse | None, ...]
    took: float | None = None
