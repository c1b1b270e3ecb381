"""Messages that all ranks of the job send each other when a run starts."""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.transport.connect import gather, patience, store_connection

_PREFIX = "adaptra/gather"


class StoreGather:
    """A store gather sends objects of `rank`, one of `size`, to all others through torch's `store`.

    A collective of torch's would use the backend, which on GPUs is work on the device.

    All ranks call `gather` equally often. `timeout`: seconds that rank 0 waits for the others,
    `waits.CONNECT` if None. These wait `waits.CHAIN` longer for it: by then it has written which
    rank is missing.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float | None = None) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout, self._number = timeout, 0

    def gather(self, mine: Any) -> list[Any]:
        """Return what ranks give as `mine`, by rank. Raises PeerLost, naming a missing rank.

        Each rank's object goes to rank 0, which hands all of them out: of N ranks none reads more
        than N keys.
        """
        number, self._number = self._number, self._number + 1
        everything = f"{_PREFIX}/{number}/all"
        end = time.monotonic() + (waits.CONNECT if self._timeout is None else self._timeout)
        if self._rank:
            self._store.set(self._key(number, self._rank), pickle.dumps(mine))
            self._wait(everything, "rank 0", end + waits.CHAIN)
            found = pickle.loads(self._store.get(everything))
            if isinstance(found, PeerLost):
                raise found
            return list(found)
        values = [mine]
        for rank in range(1, self._size):
            key = self._key(number, rank)
            try:
                self._wait(key, f"rank {rank}", end)
            except PeerLost as error:
                self._store.set(everything, pickle.dumps(error))
                raise
            values.append(pickle.loads(self._store.get(key)))
            self._store.delete_key(key)
        self._store.set(everything, pickle.dumps(values))
        if number > 1:  # all have been at the one after it, and so have read it
            self._store.delete_key(f"{_PREFIX}/{number - 2}/all")
        return values

    def _wait(self, key: str, who: str, end: float) -> None:
        """Wait until `who` has written `key`, or until `end`, on the monotonic clock."""
        try:
            left = max(0.001, end - time.monotonic())
            self._store.wait([key], timedelta(seconds=left))
        except Exception as error:  # torch has several types for it
            raise PeerLost(f"{who} has written nothing to torch's store: {error}") from error

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"{_PREFIX}/{number}/{rank}"


_gather: StoreGather | None = None


def from_all_ranks(mine: Any) -> list[Any]:
    """Gather each rank's `mine`, by rank; a collective of all.

    Over gloo a rank that has died is known at once; else torch's store is used. Raises PeerLost for
    a rank that does not come.
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
