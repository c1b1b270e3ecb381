"""The collective plans that a measurement compares, with what is tuned about each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.plan.collectives.chain import sorted_chain
from megatron_adaptra.plan.collectives.direct import direct, shares_without
from megatron_adaptra.plan.collectives.halving_doubling import halving_doubling
from megatron_adaptra.plan.collectives.ring import ring
from megatron_adaptra.plan.collectives.stragglar import CHUNKS, stragglar

_PIECE = 1.9e-3  # seconds of a port that a piece takes: shorter ones cost more than they overlap
_LOCAL_PIECE = 256 << 10  # bytes of a piece where no port is slow
_MOST_PIECES = 64


def plan_of(name: str, ranks: int, nbytes: int, late: Sequence[int], rate: float) -> CollectivePlan:
    """The plan of the algorithm `name`.

    Args:
        name: one of AllReduceOptions' algorithms but NATIVE.
        ranks: how many.
        nbytes: of the buffer.
        late: ranks that come late: they own nothing in `direct`, and add last in a chain.
        rate: bytes per second through a port; inf where it is not limited.
    """
    piece = _PIECE * rate if math.isfinite(rate) else _LOCAL_PIECE
    if name == "ring":
        return ring(ranks)
    if name == "halving-doubling":
        return halving_doubling(ranks)
    if name == "sorted-chain":
        in_time = [rank for rank in range(ranks) if rank not in late]
        return sorted_chain([*in_time, *late], _count(nbytes / piece))
    if name == "stragglar":
        return stragglar(ranks, late[0], CHUNKS)
    return direct(shares_without(ranks, late), _count(nbytes / (ranks - len(late)) / piece))


def possible(name: str, ranks: int, late: Sequence[int]) -> bool:
    """Whether the algorithm `name` has a plan for so many `ranks`, of whom those come `late`."""
    return name != "stragglar" or (ranks >= 4 and len(late) == 1)


def _count(pieces: float) -> int:
    return min(max(1, round(pieces)), _MOST_PIECES)
