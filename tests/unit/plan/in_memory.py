"""Runs a collective plan over lists of numbers: a second opinion on what its ops mean."""

import random

from hypothesis import assume
from hypothesis import strategies as st

from megatron_adaptra.ir.collective import Action, CollectiveOp, CollectivePlan


def run_in_memory(plan: CollectivePlan, buffers: list[list], seed: int = 0) -> list[list]:
    """What each rank ends with. `seed`: for which rank goes on next."""
    rng = random.Random(seed)
    bounds = plan.bounds(len(buffers[0]))
    held = [list(buffer) for buffer in buffers]
    inbox: dict[tuple[int, int, int], list] = {}
    left = [list(line) for line in plan.order]
    while any(left):
        able = [
            rank
            for rank, line in enumerate(left)
            if line and all((s, rank, line[0].tag) in inbox for s in line[0].sources(rank))
        ]
        rank = rng.choice(able)
        op = left[rank].pop(0)
        here = slice(bounds[op.piece], bounds[op.piece + op.length])
        if op.action.sends:
            for target in op.ranks:
                inbox[rank, target, op.tag] = held[rank][here]
        elif op.action is Action.TAKE:
            held[rank][here] = inbox.pop((op.ranks[0], rank, op.tag))
        else:
            terms = [
                held[rank][here] if one == rank else inbox.pop((one, rank, op.tag))
                for one in op.ranks
            ]
            total = terms[0]
            for term in terms[1:]:
                total = [a + b for a, b in zip(total, term, strict=True)]
            held[rank][here] = total
    assert not inbox
    return held


def random_buffers(rng: random.Random, ranks: int, elements: int) -> list[list[float]]:
    """Numbers of very different sizes, so that another order of addition has other bits."""
    return [
        [rng.uniform(-1, 1) * 10.0 ** rng.randint(-9, 9) for _ in range(elements)]
        for _ in range(ranks)
    ]


def without_one_message(
    plan: CollectivePlan, data: st.DataObject
) -> tuple[tuple[CollectiveOp, ...], ...]:
    """The lines of a `plan`, but for one message that `data` draws: its send, and its receive."""
    sends = [(r, op) for r, line in enumerate(plan.order) for op in line if op.action.sends]
    assume(sends)
    source, sent = data.draw(st.sampled_from(sends))
    target = data.draw(st.sampled_from(sent.ranks))

    def without(op: CollectiveOp, rank: int) -> CollectiveOp:
        return op._replace(ranks=tuple(one for one in op.ranks if one != rank))

    lines = [list(line) for line in plan.order]
    lines[source] = [without(op, target) if op is sent else op for op in lines[source]]
    for i, op in enumerate(lines[target]):
        if source in op.sources(target) and op.tag == sent.tag:
            lines[target][i] = without(op, source)
    return tuple(
        tuple(op for op in line if op.ranks and op.ranks != (rank,))
        for rank, line in enumerate(lines)
    )
