"""Messages that all ranks of the job send each other when a run starts."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_adaptra.agree.store_gather import StoreGather
from megatron_adaptra.base import waits
from megatron_adaptra.transport.connect import gather, patience, store_connection

_gather: StoreGather | None = None


def from_all_ranks(mine: Any) -> list[Any]:
    """Gather each rank's `mine`, by rank; a collective of all.

    Over gloo a rank that has died is known at once. Other backends would put work on a device,
    where stock Megatron has none, so torch's store is used instead. Raises PeerLost for a rank that
    does not come.
    """
    global _gather
    if dist.get_backend() == "gloo":
        return gather(mine)
    if _gather is None:
        _gather = StoreGather(
            store_connection(), dist.get_rank(), dist.get_world_size(), patience(waits.CONNECT)
        )
    return _gather.gather(mine)


def reason_anywhere(reason: str, waited: bool = False) -> str:
    """Return a rank that cannot go on, and its reason, or an empty string; a collective of all.

    `reason`: this rank's own, or an empty string. `waited`: the reason is that another rank did not
    come; then reasons of other kinds go first.
    """
    gathered = from_all_ranks((waited, reason))
    found = [(late, rank, why) for rank, (late, why) in enumerate(gathered) if why]
    return "rank {1}: {2}".format(*min(found)) if found else ""
