"""The equality of both arms' results: to the last bit or, where sums change, to rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_adaptra.ir.schedule import Schedule

# By precision, the largest relative difference of losses that counts as rounding. Another order of
# sums has made less than 1e-7 in 50 iterations of fp32, and 1e-4 in bf16.
ROUNDING = {"fp32": 1e-5, "bf16": 1e-2}


@dataclass(frozen=True)
class Differences:
    """Differences compare the arms at the end of a run; see docs/files.md.

    Args:
        losses_identical, parameters_identical: to the last bit.
        losses_difference: the largest relative difference of an iteration's losses; infinite where
            one is no number.
        parameters_difference: the norm of the difference of all parameters of a rank, as a share
            of their norm; of the rank where that is largest.
        equal_to_rounding: where bits differ, whether the order of sums explains it: a plan has
            moved microbatches, gradients were reduced by one, or replicas ran other numbers of
            microbatches, and the losses are that near; None where bits are the same, or cannot be,
            as dropout has fallen on other values.
    """

    losses_identical: bool
    parameters_identical: bool
    losses_difference: float
    parameters_difference: float
    equal_to_rounding: bool | None

    @classmethod
    def between(
        cls,
        losses: Mapping[str, Sequence[float]],
        digests: Sequence[Mapping[str, str]],
        apart: Sequence[float],
        plans: Sequence[Schedule],
        precision: str,
        dropout: float = 0.0,
        reduced: bool = False,
        shared: bool = False,
    ) -> Differences:
        """Compare the arms `stock` and `adaptra`.

        Args:
            losses: by arm, of each iteration.
            digests: by rank and arm, of the parameters.
            apart: by rank, see `Arm.apart`.
            plans: that were in force.
            precision: "fp32" or "bf16".
            dropout: its probability. Where single microbatches have moved it goes by home.
            reduced: gradients were reduced by a plan of ours, in another order than Megatron's.
            shared: replicas ran other numbers of microbatches than in stock; dropout goes by where
                one runs.
        """
        pairs = list(zip(losses["stock"], losses["adaptra"], strict=True))
        same = all(a == b for a, b in pairs)
        alike = all(each["stock"] == each["adaptra"] for each in digests)
        largest = max((_relative(a, b) for a, b in pairs), default=0.0)
        rounding = None
        masked = dropout > 0 and (shared or not all(plan.keeps_order for plan in plans))
        reduced = reduced or shared  # either one changes the order of sums
        if not ((same and alike) or masked):
            rounding = (reduced or any(map(sums_change, plans))) and largest <= ROUNDING[precision]
        return cls(same, alike, largest, max(apart, default=0.0), rounding)


def sums_change(schedule: Schedule) -> bool:
    """Return whether the `schedule` sums gradients in another order than Megatron.

    Two replicas that exchange whole pipelines add the same two sums, in either order; with more
    replicas the order changes the sum.
    """
    moved = schedule.routes.moved
    if not moved or schedule.replicas > 2:
        return bool(moved)
    lines = [[op for op in line if op.kind.value == "F"] for line in schedule.order]
    return any(len({op.home for op in line}) > 1 or not line for line in lines)


def _relative(a: float, b: float) -> float:
    if a == b:
        return 0.0
    share = abs(a - b) / max(abs(a), abs(b))
    return share if math.isfinite(share) else math.inf
