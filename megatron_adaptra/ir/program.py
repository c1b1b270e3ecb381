"""A schedule with its communication: what an executor runs and the simulator times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise, takewhile
from typing import NamedTuple

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.deps import ACTIVATION, carried, maker
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.posting import Flow, Link, Work, links_of, receives_ahead, traffic_of
from megatron_adaptra.ir.routes import Routes, routes_of
from megatron_adaptra.ir.schedule import Line, Schedule


@dataclass(frozen=True)
class Program:
    """Compute ops plus sends and posted receives, per worker; made only by `lower`.

    A send never blocks the worker. A post gives the transport a buffer for a message that is to
    come; the compute op that uses the message waits for it.

    Args:
        order: per worker, its ops in the order in which it runs them.
        microbatches: of an iteration, per replica.
        chunks: per stage.
        ahead: by directed link (source worker, target worker), how many receives stand posted on it
            from the start; at least 0.
        replicas: how many pipelines the workers form.
    """

    order: tuple[Line, ...]
    microbatches: int
    chunks: int = 1
    ahead: Mapping[Link, int] = field(default_factory=dict)
    replicas: int = 1

    @property
    def stages(self) -> int:
        """How many stages each replica has."""
        return len(self.order) // self.replicas

    @cached_property
    def routes(self) -> Routes:
        """The routes: which worker runs which op."""
        return routes_of(self.order, self.chunks, self.replicas)


def links_ahead(warmup: Sequence[int]) -> dict[Link, int]:
    """Return the `posting.receives_ahead` of 1F1B with these `warmup` depths, one per stage.

    Per directed link, slack + 1 and at least 1, where slack is the difference of the depths of its
    two stages.
    """
    ahead: dict[Link, int] = {}
    for i, (depth, below) in enumerate(pairwise(warmup)):
        ahead[i, i + 1] = ahead[i + 1, i] = max(1, depth - below + 1)
    return ahead


def lower(schedule: Schedule, ahead: Mapping[Link, int] | int | None = None) -> Program:
    """Add the sends and the receive posts.

    The first `ahead[link]` receives of a link are posted before anything else runs; each further
    one just before the compute op that uses the oldest one still outstanding.

    Args:
        schedule: the order of the ops that compute.
        ahead: receives by directed link, or one number for all links (0: posted when needed, as
            Megatron does); None for those of `posting.receives_ahead`.

    Raises:
        BadInput: a number is negative.
    """
    traffic = traffic_of(schedule)
    if ahead is None:
        depths = receives_ahead(traffic, schedule.routes)
    elif isinstance(ahead, int):
        depths = dict.fromkeys(links_of(traffic, schedule.routes), ahead)
    else:
        depths = dict(ahead)
    if any(depth < 0 for depth in depths.values()):
        raise BadInput("ahead", depths, "a number of receives is at least 0")
    order = tuple(lower_line(works, depths) for works in traffic)
    return Program(order, schedule.microbatches, schedule.chunks, depths, schedule.replicas)


def lower_line(works: Sequence[Work], depths: Mapping[Link, int]) -> Line:
    """`lower` for the line of one worker.

    Args:
        works: its ops with what each receives and sends, see `traffic.works_of`.
        depths: how many receives of each link to post ahead.
    """
    posts: dict[Flow, list[Op]] = {}  # receives in the order of their use
    for work in works:
        if work.used is not None:
            kind = Kind.POST_F if work.used[2] == ACTIVATION else Kind.POST_B
            posts.setdefault(work.used, []).append(work.op._replace(kind=kind))
    out: list[Op] = []
    following: dict[Flow, Iterator[Op]] = {}  # receives that are posted later
    for flow, queue in posts.items():
        first = depths.get(flow[:2], 1)
        out += queue[:first]
        following[flow] = iter(queue[first:])
    for work in works:
        if work.used is not None:
            out += islice(following[work.used], 1)
        out.append(work.op)
        if work.sent is not None:
            kind = Kind.SEND_F if work.sent[2] == ACTIVATION else Kind.SEND_B
            out.append(work.op._replace(kind=kind))
    return tuple(out)


class Exchange(NamedTuple):
    """One message of a worker: the output of `made`, F or B, which `peer` gets or has made."""

    made: Op
    peer: int


@dataclass(frozen=True)
class Neighbours:
    """The neighbours of a `worker`, microbatch by microbatch, as the `routes` have them.

    In a single pipeline they are the stages before and after it; with chunks the last stage and the
    first are neighbours, too.
    """

    worker: int
    routes: Routes

    @property
    def stage(self) -> int:
        """The stage of the worker."""
        return self.worker % self.stages

    @property
    def stages(self) -> int:
        """The number of stages of each replica."""
        return self.routes.stages

    def exchange(self, op: Op) -> Exchange:
        """The message that `op`, a send or a post, moves. Both ends name the same `made`."""
        token = carried(op, self.worker, self.routes)
        assert token is not None
        kind, _, microbatch, home = token
        chunk = token.position // self.stages
        made = Op(Kind.F if kind == ACTIVATION else Kind.B, microbatch, chunk, home)
        if op.kind in (Kind.POST_F, Kind.POST_B):
            return Exchange(made, maker(token, self.routes))
        position = token.position + (1 if op.kind is Kind.SEND_F else -1)
        return Exchange(made, self.routes.worker(position, microbatch, home))


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
