"""The estimate of a data-parallel group's all-reduce: from what its ranks saw to Figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_adaptra.ir.conditions import LinkState
from megatron_adaptra.measure.arrivals import Pair, Seen
from megatron_adaptra.measure.late_ranks import LateRanks
from megatron_adaptra.measure.port_rates import PortRates
from megatron_adaptra.plan.reductions.figures import Figures
from megatron_adaptra.plan.reductions.sized import MESSAGE


class AllReduceEstimate:
    """An estimate learns from iterations what an all-reduce of so many `ranks` takes.

    All ranks take the same iterations, and so come to the same figures. `cost`: seconds that each
    message takes of its sender's port. `late_ranks`: see LateRanks; `ports`: see PortRates. Raises
    BadInput for fewer than two ranks.
    """

    def __init__(self, ranks: int, cost: float = MESSAGE) -> None:
        self.late_ranks, self.ports = LateRanks(ranks), PortRates(ranks)
        self._cost = cost

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
        ports = self.ports.ports(self.late_ranks.delay(), self._cost)
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
