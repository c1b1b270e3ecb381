"""One rank's part in a collective plan for a buffer of one size: elements in place of pieces."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from megatron_adaptra.ir.collective import Action, CollectiveOp, CollectivePlan

_Key = tuple[int, int]  # source, tag


class Receive(NamedTuple):
    """A message of `elements` from `source`, with the plan's `tag`.

    `begin`: where it goes, in the buffer, or where it is `staged`, in memory beside it.
    """

    source: int
    tag: int
    begin: int
    elements: int
    staged: bool


class Step(NamedTuple):
    """An op on the elements `[begin, end)` of the buffer.

    `ranks`: as in the op. `receives`: its messages, by source. `finished`: where its elements are
    the sum of all ranks afterwards, relative to `begin`; only after an addition, and of a
    reduce-scatter in the own shard alone.
    """

    action: Action
    begin: int
    end: int
    tag: int
    ranks: tuple[int, ...]
    receives: dict[int, int]
    finished: tuple[slice, ...] = ()


class Layout:
    """A layout lists the steps of `rank` under `plan`, for a buffer of so many `elements`.

    `steps`: in order, without those of empty pieces; the first `ready` of them are sends that need
    no other rank's part. `receives`: all to be posted at the start; from each source in the order
    in which it sends, as a transport may hand messages over in the order in which their receives
    were posted. `staged`: elements of memory beside the buffer.
    """

    def __init__(self, plan: CollectivePlan, rank: int, elements: int) -> None:
        bounds, owners = plan.bounds(elements), plan.owners

        def span(op: CollectiveOp) -> tuple[int, int]:
            return bounds[op.piece], bounds[op.piece + op.length]

        line = [op for op in plan.order[rank] if span(op)[1] > span(op)[0]]
        added = {
            piece: i for i, op in enumerate(line) if op.action is Action.ADD for piece in op.pieces
        }
        taken = {piece for op in line if op.action is Action.TAKE for piece in op.pieces}
        wanted = {(s, op.tag): op for op in line for s in op.sources(rank)}
        self.receives: list[Receive] = []
        self.staged = 0
        numbers: dict[_Key, int] = {}
        for source, tag in _as_sent(plan, rank):
            if (op := wanted.get((source, tag))) is None:
                continue  # it is empty
            begin, end = span(op)
            # A sum goes straight to its place, unless something else is written there before.
            staged = op.action is Action.ADD or any(piece in added for piece in op.pieces)
            numbers[source, tag] = len(self.receives)
            where = self.staged if staged else begin
            self.receives.append(Receive(source, tag, where, end - begin, staged))
            self.staged += (end - begin) * staged
        self.steps: list[Step] = []
        for i, op in enumerate(line):
            begin, end = span(op)
            finished: tuple[slice, ...] = ()
            if op.action is Action.ADD:
                last = [
                    p
                    for p in op.pieces
                    if added[p] == i and p not in taken and (not owners or owners[p] == rank)
                ]
                whole = len(last) == op.length
                finished = tuple(slice(bounds[p] - begin, bounds[p + 1] - begin) for p in last)
                finished = (slice(0, end - begin),) if whole else finished
            receives = {s: numbers[s, op.tag] for s in op.sources(rank)}
            self.steps.append(Step(op.action, begin, end, op.tag, op.ranks, receives, finished))
        self.ready = sum(1 for _ in takewhile(lambda step: step.action.sends, self.steps))


def _as_sent(plan: CollectivePlan, rank: int) -> list[_Key]:
    """Return the messages to `rank` by source, those of a source in the order of its sends."""
    return [
        (source, op.tag)
        for source, line in enumerate(plan.order)
        for op in line
        if op.action.sends and rank in op.ranks
    ]
