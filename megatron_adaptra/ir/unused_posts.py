"""The receives that stand posted before an iteration runs, and how to clear them away again."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from megatron_adaptra.ir.deps import ACTIVATION, carried
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Program


class UnusedPosts(NamedTuple):
    """How a stage clears its links of an iteration that got no further than its first posts.

    `to_send`: sends of anything, for receives that stand posted at the neighbours; then
    `to_discard`: its own posts, whose messages are forgotten.
    """

    to_send: tuple[Op, ...]
    to_discard: tuple[Op, ...]


def first_posts(program: Program, stage: int) -> tuple[Op, ...]:
    """The receives that `stage` posts before anything else."""
    posts = (Kind.POST_F, Kind.POST_B)
    return tuple(takewhile(lambda op: op.kind in posts, program.order[stage]))


def unused_posts(program: Program, stage: int) -> UnusedPosts:
    """What all stages have posted first, as `stage` has to clear it away.

    Both ends of a link know it from the program, so nobody asks.
    """
    stages = program.stages
    near = {(stage - 1) % stages, (stage + 1) % stages} - {stage}
    posted = [carried(op, s, stages) for s in sorted(near) for op in first_posts(program, s)]
    asked = [token for token in posted if token and token.position % stages == stage]
    sends = [
        Op(Kind.SEND_F if t.kind == ACTIVATION else Kind.SEND_B, t.microbatch, t.position // stages)
        for t in asked
    ]
    return UnusedPosts(tuple(sends), first_posts(program, stage))
