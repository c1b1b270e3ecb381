"""Traffic of a schedule: the tokens that each op waits for, receives, makes and sends."""

from __future__ import annotations

from typing import NamedTuple

from megatron_adaptra.ir.deps import (
    Token,
    consumer,
    maker,
    makes,
    needs,
    recomputed_of,
    remote_need,
)
from megatron_adaptra.ir.op import Op
from megatron_adaptra.ir.routes import Routes
from megatron_adaptra.ir.schedule import Line, Schedule

Flow = tuple[int, int, str]  # source, target, kind of token: two workers may exchange both kinds


class Work(NamedTuple):
    """One op of a schedule, with its tokens.

    Args:
        op: one that computes.
        needs: the tokens that it waits for.
        used: the flow that brings one of these from another worker, if any does.
        came: the token that `used` brings, if any.
        made: the token that it makes, if any.
        sent: the flow that takes `made` to another worker, if any does.
    """

    op: Op
    needs: list[Token]
    used: Flow | None
    came: Token | None
    made: Token | None
    sent: Flow | None


def works_of(line: Line, worker: int, routes: Routes) -> list[Work]:
    """The ops of the `line` of one `worker`, with their tokens as the `routes` have them."""
    recomputed = recomputed_of(line)
    works = []
    for op in line:
        came, made = remote_need(op, worker, routes), makes(op, worker, routes)
        used = None if came is None else (maker(came, routes), worker, came.kind)
        to = None if made is None else consumer(made, routes)
        sent = None if to is None or made is None else (worker, to, made.kind)
        needed = needs(op, worker, routes, op[1:] in recomputed)
        works.append(Work(op, needed, used, came, made, sent))
    return works


def traffic_of(schedule: Schedule) -> list[list[Work]]:
    """`works_of` every worker of a `schedule`."""
    return [works_of(line, worker, schedule.routes) for worker, line in enumerate(schedule.order)]
