"""The traffic of a schedule, and how many receives to keep posted on each link.

A transport of the rendezvous kind moves a message only once its receive has been posted. With too
few posted a deeper warmup gains nothing, and a send that waits for its receive can hang a pipeline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
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

Link = tuple[int, int]
Flow = tuple[int, int, str]  # source, target, kind of token: two workers may exchange both kinds
_NEVER = -1


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


Traffic = Sequence[Sequence[Work]]  # per worker


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


def receives_ahead(traffic: Traffic, routes: Routes) -> dict[Link, int]:
    """Per directed link, the receives to keep posted: nothing hangs, and slow links stay full.

    Receives are posted in the order of their use, so a message that is sent long before it is used
    asks for many. Two workers know of each other by what they receive. While a sender has received
    k messages of the receiver, it may send what stands before its use of the next one; the receiver
    has used, or will use without receiving more, what stands before its own next message. One more
    than the difference keeps a slow link full once the pipeline is (in the warmup of stages of
    equal depth more would help). Between warmups of 1F1B kind that is slack + 1, where slack is the
    difference of the warmup depths of the two stages.

    The receives of one run in unit time are posted, too; that run proves that no send can hang.

    With several replicas, only workers that exchange messages have links.

    `traffic`, `routes`: of a schedule.
    """
    ahead = dict.fromkeys(links_of(traffic, routes), 1)
    place: dict[Token, int] = {}  # of each message, how many of its flow are used before it
    for works in traffic:
        counts: dict[Flow, int] = {}
        for work in works:
            if work.used is not None and work.came is not None:
                place[work.came] = counts.get(work.used, 0)
                counts[work.used] = place[work.came] + 1
    for (source, target, _), lead in _leads(traffic, place).items():
        ahead[source, target] = max(ahead.get((source, target), 1), 1 + lead)
    for (source, target, _), most in _run(traffic, place).items():
        ahead[source, target] = max(ahead.get((source, target), 1), most)
    return ahead


def links_of(traffic: Traffic, routes: Routes) -> list[Link]:
    """Return all links of a pipeline; with several replicas, those that are used, sorted."""
    stages = routes.stages
    if routes.replicas > 1:
        sent = {work.sent[:2] for works in traffic for work in works if work.sent is not None}
        return sorted(sent)
    links = [way for a, b in pairwise(range(stages)) for way in ((a, b), (b, a))]
    if routes.chunks > 1 and stages > 2:
        links += [(stages - 1, 0), (0, stages - 1)]
    return links


def _leads(traffic: Traffic, place: dict[Token, int]) -> dict[Flow, int]:
    """Return, by flow, the most messages that can be sent and not used yet."""
    uses: dict[Flow, list[int]] = {}
    for works in traffic:
        uses.update(_uses(works))
    leads: dict[Flow, int] = {}
    for works in traffic:
        received: dict[int, int] = {}  # by the worker that it came from
        for _, _, used, _, made, sent in works:
            if used is not None:
                received[used[0]] = received.get(used[0], 0) + 1
            if sent is not None and made in place:
                by_then = uses.get(sent, [0])
                so_far = by_then[min(received.get(sent[1], 0), len(by_then) - 1)]
                leads[sent] = max(leads.get(sent, 0), place[made] + 1 - so_far)
    return leads


def _uses(works: Sequence[Work]) -> dict[Flow, list[int]]:
    """Return, by flow and n, the messages that a worker uses before it sends its (n+1)-th back."""
    flows: dict[int, dict[Flow, None]] = {}  # by source
    for work in works:
        if work.used is not None:
            flows.setdefault(work.used[0], {})[work.used] = None
    counts = {flow: 0 for of_source in flows.values() for flow in of_source}
    out: dict[Flow, list[int]] = {flow: [] for flow in counts}
    for work in works:
        if work.used is not None:
            counts[work.used] += 1
        if work.sent is not None:
            for flow in flows.get(work.sent[1], ()):
                out[flow].append(counts[flow])
    for flow, count in counts.items():
        out[flow].append(count)
    return out


def _run(traffic: Traffic, place: dict[Token, int]) -> dict[Flow, int]:
    """Return, by flow, the receives to post for a run in which every op takes one unit of time.

    A schedule that cannot end leaves off where it hangs; `check` says so.
    """
    made: dict[Token, int] = {}  # when
    used: dict[Flow, list[int]] = {}  # when each message of a flow is
    sent: list[tuple[Flow, int, int]] = []  # when a message is, and which of its flow it is
    at, now = [0] * len(traffic), [0] * len(traffic)
    waiting: dict[Token, list[int]] = {}
    ready = list(range(len(traffic)))
    while ready:
        worker = ready.pop()
        for work in traffic[worker][at[worker] :]:
            start = [made.get(token, _NEVER) for token in work.needs]
            if _NEVER in start:
                missing = work.needs[start.index(_NEVER)]
                waiting.setdefault(missing, []).append(worker)
                break
            # A token made in a unit of time can be used in the next.
            end = now[worker] = 1 + max(now[worker], *start, 0)
            at[worker] += 1
            if work.used is not None:
                used.setdefault(work.used, []).append(end)
            if work.made is not None:
                made[work.made] = end
                ready += waiting.pop(work.made, ())
                if work.sent is not None and work.made in place:
                    sent.append((work.sent, end, place[work.made]))
    most: dict[Flow, int] = {}
    for flow, moment, number in sent:
        outstanding = number + 1 - bisect_right(used.get(flow, ()), moment)
        most[flow] = max(most.get(flow, 0), outstanding)
    return most
