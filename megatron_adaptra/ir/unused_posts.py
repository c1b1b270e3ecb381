"""The receives that stand posted before an iteration runs, and how to clear them away again."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from megatron_adaptra.ir.deps import ACTIVATION, carried, maker
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Program


class UnusedPosts(NamedTuple):
    """How a worker clears its links of an iteration that got no further than its first posts.

    `to_send`: sends of anything, for receives that stand posted at the neighbours; then
    `to_discard`: its own posts, whose messages are forgotten.
    """

    to_send: tuple[Op, ...]
    to_discard: tuple[Op, ...]


def first_posts(program: Program, worker: int) -> tuple[Op, ...]:
    """The receives that `worker` posts before anything else."""
    posts = (Kind.POST_F, Kind.POST_B)
    return tuple(takewhile(lambda op: op.kind in posts, program.order[worker]))


def unused_posts(program: Program, worker: int) -> UnusedPosts:
    """Return how `worker` clears away the receives that all workers post first.

    Both ends of a link derive it from the program, without a message.
    """
    routes, sends = program.routes, []
    for other in range(routes.workers):
        for op in first_posts(program, other) if other != worker else ():
            token = carried(op, other, routes)
            if token is not None and maker(token, routes) == worker:
                kind = Kind.SEND_F if token.kind == ACTIVATION else Kind.SEND_B
                chunk = token.position // routes.stages
                sends.append(Op(kind, token.microbatch, chunk, token.home))
    return UnusedPosts(tuple(sends), first_posts(program, worker))
