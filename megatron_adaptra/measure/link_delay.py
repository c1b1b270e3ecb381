"""The delay of a link: from stamps, where messages are received, to seconds, where plans are made.

In an iteration, messages of a link take the median of their seconds on the way (`Stamps.delay`), or
the lower quartile where threads wait for a core: such a wait makes some messages look late, a slow
link all of them. Of messages that queued behind others, the queueing does not count. A message
that was sent before its receive was posted says more about its receiver than about the link, and
counts only where there is no other. Where no message was sent, a small probe shows the delay.

Between two hosts, stamps of two clocks do not show which side was late, but their difference
cancels in a round trip, of which each direction is taken to be half. On one host, over a transport
whose messages wait for their receive to be posted, the word of that crosses the link the other way:
its time is taken off, as far as the receive was not posted ahead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from megatron_adaptra.measure.link_fit import Sample, Transfer, by_themselves, transmissions
from megatron_adaptra.measure.report import LinkSample
from megatron_adaptra.transport.base import Stamps

Link = tuple[int, int]
SMALL = 64  # bytes of a message that shows a link's delay alone
FREE = 0.5  # share of messages without queueing, from which on they alone give the delay


def link_sample(
    messages: Sequence[Stamps], probes: Sequence[Stamps] = (), through: str = ""
) -> LinkSample:
    """Sum up what came over one link in an iteration: `messages` of ops, and `probes`.

    `through`: see LinkSample.
    """
    probed = min((t.completed - t.sent for t in probes if t.nbytes <= SMALL), default=None)
    busy, alone = list[Sample](), dict[int, Transfer]()
    if probed is not None:
        busy = transmissions(larger(messages, probes), probed)
        alone = {id(one.stamps): one for one in by_themselves(messages, probed)}
    if not messages:
        return LinkSample(probed=probed, busy=tuple(busy), through=through)
    # Eager messages all count. A stage that runs all forwards before the first backward awaits only
    # a few messages.
    awaited = [t for t in messages if t.eager or t.posted <= t.sent] or messages
    # Nothing else ran in this process when these came.
    wanted = [t for t in awaited if 0 < t.wanted <= t.completed]
    quartiles = (sorted(_delays(some, alone)) for some in (awaited, wanted) if some)
    return LinkSample(
        delay=median(_delays(awaited, alone)),  # no mean: one late wake-up is not a slow link
        delay_p25=min(delays[len(delays) // 4] for delays in quartiles),
        # The least: two clocks do not show which messages have waited for their receive.
        transit=min(t.completed - t.sent for t in messages),
        ahead=median(max(0.0, t.sent - t.posted) for t in awaited),
        probed=probed,
        busy=tuple(busy),
        through=through,
    )


def larger(messages: Sequence[Stamps], probes: Sequence[Stamps]) -> list[Stamps]:
    """Return the messages and probes of a link that are not SMALL."""
    return [t for t in (*messages, *probes) if t.nbytes > SMALL]


def _delays(some: Sequence[Stamps], alone: Mapping[int, Transfer]) -> list[float]:
    """Return the seconds that `some` messages of one link were on their way.

    `alone`: by id of stamps, the message by itself; empty where no probe shows what queueing is.
    A message that queued behind others shows only how long it kept the link busy. Such messages
    count, without their queueing, where less than FREE of all were free of it.
    """
    if not alone:
        return [t.delay for t in some]
    free = [t.delay for t in some if not alone[id(t)].queued]
    if len(free) >= FREE * len(some):
        return free
    return [min(t.delay, alone[id(t)].seconds) for t in some]


class Seen(NamedTuple):
    """A sight of a link holds what messages took; an infinite `ahead` is that of posted probes."""

    seconds: float
    transit: float
    ahead: float = math.inf


def seen_by_messages(sample: LinkSample, crowded: bool = False) -> Seen | None:
    """Return what messages of ops have shown. `crowded`: threads wait for a core."""
    seconds = sample.delay_p25 if crowded else sample.delay
    if seconds is None or sample.transit is None or sample.ahead is None:
        return None
    return Seen(seconds, sample.transit, sample.ahead)


def on_the_way(link: Link, seen: Mapping[Link, Seen], hosts: Mapping[int, str]) -> float | None:
    """Return the seconds of a `link`, between `hosts` half a round trip; None if not known.

    `hosts`: by worker, an identity of its machine, which has one clock.
    """
    there, back = seen.get(link), seen.get(link[::-1])
    if there is not None and hosts[link[0]] == hosts[link[1]]:
        return there.seconds
    return None if there is None or back is None else (there.transit + back.transit) / 2


def without_handshake(
    link: Link, seen: Mapping[Link, Seen], hosts: Mapping[int, str]
) -> float | None:
    """Return the same, `hosts` too, of messages that wait for a receive, without that wait."""
    there, back = seen.get(link), seen.get(link[::-1])
    if there is None or back is None or hosts[link[0]] != hosts[link[1]]:
        return on_the_way(link, seen, hosts)
    handshake = max(0.0, back.seconds - there.ahead)
    if back.ahead < there.seconds:  # its own time may contain such a wait
        handshake = min(handshake, there.seconds / 2)
    return there.seconds - handshake
