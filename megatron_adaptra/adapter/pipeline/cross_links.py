"""Connections between replicas: opened once a plan needs them, and measured before it does."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence

from megatron_adaptra.agree.agreement import Proposal
from megatron_adaptra.agree.bundle import LINKS, SCHEDULE, Bundle, Links
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import BadBundle
from megatron_adaptra.ir.posting import links_of, traffic_of
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.transport.base import Transport
from megatron_adaptra.transport.wire import Wire

Pair = tuple[int, int]  # workers, the lower one first


class CrossLinks:
    """A CrossLinks object opens and keeps one worker's links to workers of other replicas.

    Args:
        worker: its number.
        stages: of each replica.
        ranks: global ranks, by worker.
        wire: over which the links go.
        transports: to which the links are added, each by a name that is the same at all ends.
    """

    def __init__(
        self,
        worker: int,
        stages: int,
        ranks: Sequence[int],
        wire: Wire,
        transports: dict[str, Transport],
    ) -> None:
        self._worker, self._stages, self._ranks = worker, stages, tuple(ranks)
        self._wire, self._transports = wire, transports
        self._kept: set[Pair] = set()  # of bundles that have come into force
        self._lock = threading.Lock()

    def open(self, proposal: Proposal, in_force: Bundle) -> None:
        """Open what a `proposal` asks for and is not open, before this rank agrees to it.

        A connection is of no use unless both its ends know of it: one that was opened for a refused
        proposal is opened again for the next one.

        Args:
            proposal: which may hold links, a schedule that uses links, or both.
            in_force: the bundle that is in force.

        Raises:
            BadBundle: links that cannot be, or a schedule that uses others than there are.
            PeerLost: the other end has not come in `waits.CROSS` seconds.
        """
        bundle = proposal.bundle
        links: Links = bundle[LINKS] if LINKS in bundle.values else in_force[LINKS]
        for a, b in links.pairs:
            apart = abs(a % self._stages - b % self._stages) != 1
            if b >= len(self._ranks) or apart or a // self._stages == b // self._stages:
                raise BadBundle(f"its links join workers {a} and {b}")
        if SCHEDULE in bundle.values:
            missing = crossing(bundle[SCHEDULE]) - links.pairs
            if missing:
                raise BadBundle(f"it uses links that are not there: {sorted(missing)}")
        with self._lock:
            mine = {pair for pair in links.pairs if self._worker in pair} - self._kept
        if mine:
            self._open(f"cross/{proposal.key}", sorted(mine))

    def keep(self, links: Links) -> list[int]:
        """Keep `links`, which all ranks have now; return the workers that new ones lead to."""
        with self._lock:
            new = {pair for pair in links.pairs if self._worker in pair} - self._kept
            self._kept |= new
        return Links(frozenset(new)).of(self._worker)

    def _open(self, name: str, pairs: Iterable[Pair]) -> None:
        both = [link for a, b in pairs for link in ((a, b), (b, a))]
        for kind, transport in self._transports.items():
            self._wire.extend(transport, f"{name}/{kind}", self._ranks, both, waits.CROSS)


@functools.lru_cache(maxsize=8)
def crossing(schedule: Schedule) -> frozenset[Pair]:
    """Return the pairs of workers of different replicas that exchange messages in `schedule`."""
    if schedule.replicas == 1:
        return frozenset()
    stages = schedule.stages
    links = links_of(traffic_of(schedule), schedule.routes)
    return frozenset((min(a, b), max(a, b)) for a, b in links if a // stages != b // stages)
