"""What a plan would save where reductions stay with torch's backend: a line for each change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_adaptra.runtime.all_reduce.decisions import AllReduceLog, ranks_in_words
from megatron_adaptra.runtime.all_reduce.loop import WINDOW, AllReduceLoop, Change
from megatron_adaptra.runtime.all_reduce.value import ALL_REDUCE
from megatron_adaptra.telemetry.arrivals import Pair
from megatron_adaptra.telemetry.reduction_report import ReductionReport

_QUIET = 2 * WINDOW  # iterations without another line


class ObservedLoop(AllReduceLoop):
    """Looks at one group whose reductions never change; runs at its leader.

    What ports pass is what the backend makes of them: as if all were alike, and it ran a ring.

    Args:
        ranks: global ranks of the group.
        min_gain: share of an iteration that a plan has to save to be named.
        log: of decisions, of which there are none.
        where: gradients are, in words.
    """

    def __init__(
        self, ranks: Sequence[int], min_gain: float, log: AllReduceLog, where: str
    ) -> None:
        super().__init__(ranks, min_gain, log)
        self._where = where

    # On the thread.

    def _rates(self, row: Mapping[int, ReductionReport], took: float | None) -> dict[Pair, float]:
        if not took:
            return {}
        count, turns = len(row), 1 if self._sharded else 2
        # At least as much: what has not ended when the last buffer is ready may be some of it.
        speed = max(
            max(one.nbytes / (one.buffers.overlap + took), one.buffers.last / took)
            for one in row.values()
        )
        rate = turns * (count - 1) / count * speed
        return {(a, b): rate for a in range(count) for b in range(count) if a != b}

    @property
    def _sharded(self) -> bool:
        return self._vote.in_force[ALL_REDUCE].choice.sharded

    def _delays_count(self, iteration: int) -> bool:
        """No plan for shards is chosen."""
        return False

    def _choose(self, iteration: int) -> None:
        if not self._estimate.late_ranks.changes():  # ports pass what the backend makes of them
            self._estimate.accept()
        elif self._sharded:
            self._offers(1.0)
            self._kept(iteration)
        else:
            super()._choose(iteration)

    def _offers(self, share: float) -> None:
        super()._offers(1.0)  # nothing will be done

    def _kept(self, iteration: int) -> None:
        why = "of shards none can" if self._sharded else "none would save enough"
        self._line(iteration, f"no other reduction would help: {why}")

    def _propose(self, iteration: int, change: Change) -> None:
        saves = f"would save about {100 * change.gain:.0f} % of an iteration"
        self._line(iteration, f"{change.chosen.choice} {saves}")

    def _line(self, iteration: int, about: str) -> None:
        changes, whose = "; ".join(self._estimate.late_ranks.changes()), ranks_in_words(self.ranks)
        self._vote.note(f"gradients of {whose} stay {self._where}: {changes}; {about}")
        self._estimate.accept()
        self._not_before = iteration + _QUIET
