"""The delays of links, from Megatron's own messages, which carry no stamps.

The stages' reports contain when every op ran. The message that an op waited for was sent when its
producer was over, and had arrived when the op began. (On a device all of that is read from events
around the ops.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from megatron_adaptra.ir.deps import ACTIVATION, remote_need
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.routes import Routes
from megatron_adaptra.measure.link_delay import Link, Seen, link_sample, seen_by_messages
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.transport.base import Stamps

RECENT = 3  # iterations whose median counts
FIRST_PATIENCE, MOST_PATIENCE = 64, 8192  # iterations


def stock_links(
    reports: Sequence[StageReport], chunks: int, crowded: bool = False
) -> dict[Link, Seen]:
    """Return what a pipeline's `reports` show of each link.

    `reports`: by stage. `chunks`: per stage. `crowded`: threads wait for a core. Where the
    receiving device was late itself, or its host was late to call for the message or to launch the
    op, only the rest counts. Raises ValueError for what is no op, KeyError for one that no stage
    has run.
    """
    stages = len(reports)
    routes = Routes(stages, chunks)
    times = [
        {Op.parse(text)._replace(home=None): row for text, *row in report.ops or ()}
        for report in reports
    ]
    found: dict[Link, Seen] = {}
    for stage, ops in enumerate(times):
        came: dict[int, list[Stamps]] = {}
        before = 0.0
        for op, (start, end, asked, lag) in ops.items():
            token = remote_need(op, stage, routes)
            if token is not None:
                source, kind = token.position % stages, Kind.B
                if token.kind == ACTIVATION:
                    kind = Kind.F
                made = Op(kind, token.microbatch, token.position // stages)
                sent, ready = times[source][made][1], max(before, asked)
                stamps = Stamps(sent, posted=ready, completed=max(sent, start - max(0.0, lag)))
                came.setdefault(source, []).append(stamps)
            before = end
        for source, some in came.items():
            if seen := seen_by_messages(link_sample(some), crowded):
                link = reports[source].worker, reports[stage].worker
                found[link] = seen._replace(seconds=max(0.0, seen.seconds))
    return found


class Excess:
    """An excess holds by how many seconds a link is slower for Megatron's messages than for ours.

    It can be measured only while Megatron's are in use. Later it is believed for some iterations if
    only one kind of messages is slow, twice as many each time that it is found again.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=RECENT)  # theirs, ours
        self._matters = 0.0
        self._patience = FIRST_PATIENCE
        self._unseen = 0  # iterations since it was measured

    def measure(self, theirs: float, ours: float, matters: float) -> float:
        """Take seconds over Megatron's messages; return the excess, negative if those are faster.

        `theirs`, `ours`: seconds. `matters`: seconds from which on a difference means something.
        """
        self._seen.append((theirs, ours))
        self._matters = matters
        if self._unseen > self._patience:  # it was tried again
            still = self._of_kind and self._now > 0
            self._patience = min(2 * self._patience, MOST_PATIENCE) if still else FIRST_PATIENCE
        self._unseen = 0
        return self._now

    def believed(self, ours: float) -> float:
        """Count an iteration over our messages; return the excess in seconds still believed.

        `ours`: as in `measure`, now. The excess shrinks with it: where Megatron's messages wait for
        a credit to cross the link, as over InfiniBand, they take a multiple of ours.
        """
        self._unseen += 1
        if not self._seen or not self._of_kind or self._unseen > self._patience:
            return 0.0
        then = median(before for _, before in self._seen)
        excess = self._now * (min(1.0, ours / then) if then > 0 else 1.0)
        return excess if abs(excess) >= self._matters else 0.0

    @property
    def _now(self) -> float:
        return median(theirs - ours for theirs, ours in self._seen) if self._seen else 0.0

    @property
    def _of_kind(self) -> bool:
        """True where messages of one kind are slow and those of the other are not."""
        least = median(min(both) for both in self._seen) if self._seen else 0.0
        return abs(self._now) >= max(self._matters, least)
