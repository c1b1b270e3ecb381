"""One iteration of all data-parallel replicas."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_adaptra.measure.host_use import HostUse


@dataclass(frozen=True)
class ReplicaRow:
    """An `iteration`, which `took` so many seconds from start to start, if that is known.

    `microbatches`: by replica, how many it ran. `seconds`: from its first microbatch to the end of
    its last one, before other replicas are waited for, of the last of its ranks. `uses`: of the
    host of the one of its ranks that waits most for a core, if any does.
    """

    iteration: int
    microbatches: tuple[int, ...]
    seconds: tuple[float, ...]
    uses: tuple[HostUse | None, ...]
    took: float | None = None

    sender = 0  # one rank reports all replicas
