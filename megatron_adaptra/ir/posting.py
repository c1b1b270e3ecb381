"""How many receives to keep posted on each link.

A transport of the rendezvous kind moves a message only once its receive has been posted. With too
few posted a deeper warmup gains nothing, and a send that waits for its receive can hang a pipeline.
"""

from __future__ import annotations

from itertools import pairwise

from megatron_adaptra.ir.deps import (
    Token,
    consumer,
    maker,
    makes,
    needs,
    recomputed_of,
    remote_need,
)
from megatron_adaptra.ir.routes import Routes
from megatron_adaptra.ir.schedule import Line, Schedule

Link = tuple[int, int]
Flow = tuple[int, int, str]  # source, target, kind of token: two workers may exchange both kinds
# Of each op: the flow and token it receives, the flow and token it sends; None for neither.
Traffic = list[tuple[Flow | None, Token | None, Flow | None, Token | None]]


def posted_ahead(schedule: Schedule) -> dict[Link, int]:
    """Per directed link, the receives to keep posted: nothing hangs, and slow links stay full.

    Receives are posted in the order of their use, so a message that is sent long before it is used
    asks for many. Two workers know of each other by what they receive. While a sender has received
    k messages of the receiver, it may send what stands before its use of the next one; the receiver
    has used, or will use without receiving more, what stands before its own next message. One more
    than the difference keeps a slow link full once the pipeline is (in the warmup of stages of
    equal depth more would help). Between warmups of 1F1B kind that is slack + 1, where slack is the
    difference of the warmup depths of the two stages.

    What one run in unit time needs is posted too: that run, then, proves that no send can hang.

    Of several replicas only the workers that exchange messages have links.
    """
    routes = schedule.routes
    traffic = [_traffic(line, worker, routes) for worker, line in enumerate(schedule.order)]
    ahead = _links(routes, traffic)
    place: dict[Token, int] = {}  # of each message, how many of its flow are used before it
    for rows in traffic:
        counts: dict[Flow, int] = {}
        for flow, token, _, _ in rows:
            if flow is not None and token is not None:
                place[token] = counts.get(flow, 0)
                counts[flow] = place[token] + 1
    for source, target in ahead:
        ahead[source, target] = max(1, 1 + _lead(traffic, place, source, target))
    for (source, target, _), most in _run(schedule, place).items():
        ahead[source, target] = max(ahead[source, target], most)
    return ahead


def _links(routes: Routes, traffic: list[Traffic]) -> dict[Link, int]:
    """One receive on every link of a pipeline, or on every link between replicas that is used."""
    stages = routes.stages
    if routes.replicas > 1:
        used = {flow[:2] for rows in traffic for _, _, flow, _ in rows if flow is not None}
        return dict.fromkeys(sorted(used), 1)
    ahead = {(i, j): 1 for a, b in pairwise(range(stages)) for i, j in ((a, b), (b, a))}
    if routes.chunks > 1 and stages > 1:
        ahead.setdefault((stages - 1, 0), 1)
        ahead.setdefault((0, stages - 1), 1)
    return ahead


def _traffic(line: Line, worker: int, routes: Routes) -> Traffic:
    out: Traffic = []
    for op in line:
        came, made = remote_need(op, worker, routes), makes(op, worker, routes)
        used = None if came is None else (maker(came, routes), worker, came.kind)
        to = None if made is None else consumer(made, routes)
        sent = None if to is None or made is None else (worker, to, made.kind)
        out.append((used, came, sent, made))
    return out


def _lead(traffic: list[Traffic], place: dict[Token, int], source: int, target: int) -> int:
    """How far sends over one flow of a link can be ahead of what the receiver need have used."""
    # uses[flow][n]: messages of the flow that the target uses before its (n+1)-th message back
    received, uses = 0, _uses(traffic[target], source)
    most = 0
    for used, _, flow, token in traffic[source]:
        if used is not None and used[0] == target:
            received += 1
        if flow is not None and token in place and flow[1] == target:
            by_then = uses[flow][min(received, len(uses[flow]) - 1)] if flow in uses else 0
            most = max(most, place[token] + 1 - by_then)
    return most


def _uses(traffic: Traffic, source: int) -> dict[Flow, list[int]]:
    flows = {used for used, *_ in traffic if used is not None and used[0] == source}
    counts = dict.fromkeys(flows, 0)
    out: dict[Flow, list[int]] = {flow: [] for flow in flows}
    for used, _, sent, _ in traffic:
        if used is not None and used[0] == source:
            counts[used] += 1
        if sent is not None and sent[1] == source:
            for flow in flows:
                out[flow].append(counts[flow])
    for flow in flows:
        out[flow].append(counts[flow])
    return out


def _run(schedule: Schedule, place: dict[Token, int]) -> dict[Flow, int]:
    """Per flow, the posted receives that a run needs in which every op takes one unit of time.

    A schedule that cannot end leaves off where it hangs; `check` says so.
    """
    routes = schedule.routes
    recomputed = [recomputed_of(line) for line in schedule.order]
    at = [0] * routes.workers
    made: set[Token] = set()
    used: dict[Flow, int] = {}
    most: dict[Flow, int] = {}
    moving = True
    while moving:
        ran: list[tuple[Token, Flow | None]] = []
        moving = False
        for worker, line in enumerate(schedule.order):
            if at[worker] == len(line):
                continue
            op = line[at[worker]]
            if not made.issuperset(needs(op, worker, routes, op[1:] in recomputed[worker])):
                continue
            moving = True
            at[worker] += 1
            came, out = remote_need(op, worker, routes), makes(op, worker, routes)
            if came is not None:
                flow = maker(came, routes), worker, came.kind
                used[flow] = used.get(flow, 0) + 1
            if out is not None:
                to = consumer(out, routes)
                ran.append((out, None if to is None else (worker, to, out.kind)))
        for token, sent in ran:  # what is made in a unit of time can be used in the next
            made.add(token)
            if sent is not None and token in place:
                most[sent] = max(most.get(sent, 0), place[token] + 1 - used.get(sent, 0))
    return most
