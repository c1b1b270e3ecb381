"""The ring (Patarasuk, Yuan 2009), with chunks cut into pieces that follow each other."""

from __future__ import annotations

from functools import lru_cache

from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.plan.reductions.arguments import add, part, take, total, whole


@lru_cache(maxsize=64, typed=True)
def ring(ranks: int, cut: int = 4) -> CollectivePlan:
    """`ranks` chunks, each cut into `cut` pieces, so that a delay overlaps with other pieces.

    Each rank sends to the next one. Chunk c is added from rank c on around the ring, and its sum
    goes around from the rank before c. Raises BadInput.
    """
    whole("ranks", ranks, 1)
    whole("cut", cut, 1)
    if ranks == 1:
        return CollectivePlan(((),), (1,) * cut, "ring", "one rank has the sum")
    order = []
    for rank in range(ranks):
        before, after = (rank - 1) % ranks, (rank + 1) % ranks
        line = [part(rank * cut + i, after) for i in range(cut)]
        for step in range(1, ranks):
            for piece in _pieces(rank - step, ranks, cut):
                send = part if step < ranks - 1 else total
                line += [add(piece, before, rank), send(piece, after)]
        for step in range(ranks - 1):
            for piece in _pieces(rank - step, ranks, cut):
                line.append(take(piece, before))
                if step < ranks - 2:
                    line.append(total(piece, after))
        order.append(tuple(line))
    return CollectivePlan(tuple(order), (1,) * (ranks * cut), "ring", f"chunks cut in {cut}")


def _pieces(chunk: int, ranks: int, cut: int) -> range:
    return range(chunk % ranks * cut, chunk % ranks * cut + cut)
