"""The estimate of a data-parallel group's all-reduce, and of the ports of its ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median, median_low

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import LinkState
from megatron_adaptra.measure.arrivals import Pair, Seen
from megatron_adaptra.measure.detect import RELATIVE
from megatron_adaptra.measure.late_ranks import LateRanks
from megatron_adaptra.measure.statistics import middle_of
from megatron_adaptra.plan.reductions.figures import Figures
from megatron_adaptra.plan.reductions.sized import MESSAGE
from megatron_adaptra.sim.ports import Ports

WINDOW = 5  # iterations, of whose rates the median counts
FEWEST = 3  # iterations before a path counts at all
_SPREADS = 4.0  # below the middle, from which on a path is slow: one of 30,000 by chance
_LEAST, _MOST = 1.0, 1e15  # bytes per second that a path may pass; others are nonsense
SIDES = "sends", "receives"
# One of SIDES and its rank, or "path" and its ends: bytes per second; inf: as much as its ports.
_Key = tuple[str, tuple[int, ...]]


class AllReduceEstimate:
    """An estimate learns from iterations what an all-reduce of so many `ranks` takes.

    All ranks take the same iterations, and so come to the same figures. `late_ranks`: see
    LateRanks; `ports`: see PortRates. Raises BadInput for fewer than two ranks.
    """

    def __init__(self, ranks: int) -> None:
        self.late_ranks, self.ports = LateRanks(ranks), PortRates(ranks)

    def update(
        self,
        seen: Seen,
        rates: Mapping[Pair, float],
        nbytes: int,
        between: Mapping[int, float] | None = None,
    ) -> bool:
        """Take one iteration; return whether something is no longer as planned for.

        Args:
            seen: arrivals of messages of a few bytes, as for LateRanks. Ignored until all ports are
                known: lateness is judged by the seconds that a buffer takes through a port.
            rates: bytes per second by path, as for PortRates; {} if none was measured.
            nbytes: bytes of the buffer.
            between: as for LateRanks; None where it is not known.
        """
        changed = self.ports.update(rates)
        if not self.ports.known or nbytes <= 0:
            return False
        buffer = Figures(nbytes, self.ports.ports(), (0.0,) * self.ports.ranks, 1.0).buffer
        return self.late_ranks.update(seen, buffer, between) or changed

    def figures(self, nbytes: int, iteration: float, native: float | None = None) -> Figures | None:
        """Return what the selector chooses by; None until all ports are known.

        `nbytes`, `iteration` (seconds) and `native` (seconds, or None): as for Figures. Raises
        BadInput, as Figures.
        """
        if not self.ports.known:
            return None
        ports = self.ports.ports(self.late_ranks.delay(), MESSAGE)
        paths = dict(ports.paths)
        for way, more in self.late_ranks.slow_paths().items():
            paths[way] = LinkState(more, paths.get(way, LinkState()).bandwidth)
        late = self.late_ranks.late()
        return Figures(nbytes, replace(ports, paths=paths), late, iteration, native)

    def changes(self, names: Sequence[int]) -> list[str]:
        """Describe the changes since the last `accept`, for a decision; `names`: global ranks."""
        return self.late_ranks.changes(names) + self.ports.changes(names)

    def accept(self) -> None:
        """Note that the plan in force is made for the changes, too."""
        self.late_ranks.accept()
        self.ports.accept()


class PortRates:
    """A PortRates measures the ports of so many `ranks`. Raises BadInput for fewer than two.

    Paths are what is measured. A path passes at most what its sender's port, its receiver's port
    and the network between them pass; a port passes at least what its fastest path does. So a port
    is slow if all its paths are slow, and a path is slow if both its ports do better on others. Of
    two ranks a slow path counts as slow ports.
    """

    def __init__(self, ranks: int) -> None:
        if ranks < 2:
            raise BadInput("ranks", ranks, "at least 2: ports are measured by what goes between")
        self.ranks = ranks
        self._rates: dict[Pair, deque[float]] = {}
        self._paths: dict[Pair, float] = {}  # the medians of those measured often enough
        self._ends = set[int](), set[int]()  # of these, the sources and the targets
        self._planned: dict[_Key, float] = {}
        self._changed: dict[_Key, float] | None = None  # what `_now` has found; None: to be found

    def update(self, rates: Mapping[Pair, float]) -> bool:
        """Take `rates` of paths; return whether a port or path is not as planned for.

        `rates`: by source and target, bytes per second of a path with both its ports to itself.
        Paths of unknown ranks, and impossible rates, are left out.
        """
        ranks = range(self.ranks)
        for way, rate in rates.items():
            source, target = way
            if source in ranks and target in ranks and source != target and _LEAST <= rate <= _MOST:
                self._take(way, rate)
        return bool(self._now())

    @property
    def known(self) -> bool:
        """True once each rank's port has been measured both ways."""
        return all(len(ranks) == self.ranks for ranks in self._ends)

    def _take(self, way: Pair, rate: float) -> None:
        rates = self._rates.setdefault(way, deque(maxlen=WINDOW))
        rates.append(rate)
        if len(rates) >= FEWEST:
            self._paths[way] = median(rates)
            for ranks, rank in zip(self._ends, way, strict=True):
                ranks.add(rank)
            self._changed = None

    def ports(self, delay: float = 0.0, cost: float = 0.0) -> Ports:
        """Return the ports, and paths that pass less than both their ports.

        Ports whose rates differ by less than RELATIVE from the middle one are taken to be equal.

        `delay`, `cost`: as for `sim.ports.Ports`. Raises BadInput while not all are known.
        """
        if not self.known:
            raise BadInput("ports", "not all measured", "both ways of each, in a few iterations")
        now = self._planned | self._now()
        out, into = (_alike([now[side, (r,)] for r in range(self.ranks)]) for side in SIDES)
        slow = {
            (ends[0], ends[1]): LinkState(0.0, rate)
            for (kind, ends), rate in sorted(now.items())
            if kind == "path" and rate < (1 - RELATIVE) * min(out[ends[0]], into[ends[1]])
        }
        return Ports(out, into, delay, cost, paths=slow)

    def changes(self, names: Sequence[int]) -> list[str]:
        """Describe the changes since the last `accept`, for a decision; `names`: global ranks.

        A port that was not known before counts only if it differs from the other ports.
        """
        found = []
        now = self._now()
        for (kind, ends), rate in sorted(now.items()):
            planned = self._planned.get((kind, ends))
            if kind == "path":
                words = "as much as its ports" if rate == math.inf else _rate(rate)
                found.append(f"path {'>'.join(str(names[end]) for end in ends)} passes {words}")
                continue
            if planned is None:
                planned = median(r for (side, _), r in now.items() if side == kind)
                if not _differ(rate, planned):
                    continue
                words = f"others {_rate(planned)}"
            else:
                words = f"before {_rate(planned)}"
            found.append(f"rank {names[ends[0]]} {kind} {_rate(rate)}, {words}")
        return found

    def accept(self) -> None:
        """Note that the plan in force is made for the ports and paths as they are now."""
        self._planned |= self._now()
        self._changed = None

    def _now(self) -> dict[_Key, float]:
        """Return the rates that differ from those planned for, by more than RELATIVE of them."""
        if self._changed is None:  # most iterations measure no path
            self._changed = self._find()
        return self._changed

    def _find(self) -> dict[_Key, float]:
        found: dict[_Key, float] = {}
        for ends, rate in self._paths.items():
            for side, rank in zip(SIDES, ends, strict=True):
                found[side, (rank,)] = max(rate, found.get((side, (rank,)), 0.0))
        shares = {
            ends: rate / min(found[side, (rank,)] for side, rank in zip(SIDES, ends, strict=True))
            for ends, rate in self._paths.items()
        }
        least = _ordinary(list(shares.values())) if shares else 0.0
        for ends, rate in self._paths.items():
            slow = shares[ends] < least
            if slow or ("path", ends) in self._planned:
                found["path", ends] = rate if slow else math.inf
        return {
            what: rate for what, rate in found.items() if _differ(rate, self._planned.get(what))
        }


def _differ(rate: float, planned: float | None) -> bool:
    if planned is None or math.inf in (rate, planned):
        return rate != planned
    return abs(rate - planned) > RELATIVE * planned


def _ordinary(shares: Sequence[float]) -> float:
    """Return the least share of its ports' rate that a path passes without being slow.

    A port's rate is that of its fastest path, so that of many paths most seem to pass less than
    their ports, and a few much less. A path is slow only if it passes less than this spread allows.
    """
    middle, spread = middle_of(shares)
    return min(1 - RELATIVE, middle - _SPREADS * spread)


def _alike(rates: Sequence[float]) -> tuple[float, ...]:
    middle = median_low(rates)
    return tuple(rate if _differ(rate, middle) else middle for rate in rates)


def _rate(rate: float) -> str:
    return f"{rate / 1e6:.3g} MB/s"
