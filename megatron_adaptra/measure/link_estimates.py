"""Estimates of what links take now: a chart and a model for each, fed with reports.

Links run between workers, of one pipeline or of several, numbered as in `ir.routes`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

from megatron_adaptra.ir.conditions import LinkState
from megatron_adaptra.measure.detect import ABSOLUTE, RELATIVE, DelayChart
from megatron_adaptra.measure.link_delay import (
    Link,
    Seen,
    on_the_way,
    seen_by_messages,
    without_handshake,
)
from megatron_adaptra.measure.link_fit import LinkFit, Sample, slope_of
from megatron_adaptra.measure.port_use import PortModel
from megatron_adaptra.measure.report import LinkSample, StageReport
from megatron_adaptra.measure.stock_messages import Excess, stock_links

WELL = 5  # iterations whose medians are what a healthy link takes
_BETWEEN = 4  # links that a worker between two others has at least
TIME_SLICE = 0.004  # seconds for which Linux lets a process have a core that others want
LONGEST = 3600.0  # seconds: no message takes longer
ALIKE = 2.0  # the most by which rates of links that share a port differ, as a factor
THIN = 0.05  # of a stage's seconds, from which on a message's time on the wire matters


class LinkEstimates:
    """An estimate follows directed links: by default all between neighbours of one pipeline.

    Args:
        hosts: by worker, an identity of its machine. Workers of one machine share a clock; between
            machines only the round trip is known, and its halves are taken for equal.
        message_bytes: bytes of one message of the pipeline.
        chunks: model chunks per stage; several make the stages a ring.
        rendezvous: True where a message moves only after its receive is posted.
        shared: True where workers share cores.
        on_device: True where Megatron's own messages are NCCL's.
        links: those to begin with; None for those of a pipeline.

    `charts`: by link, the chart of the seconds that a message takes. `samples`: these seconds, by
    link that was measured in the last iteration.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        message_bytes: int,
        *,
        chunks: int = 1,
        rendezvous: bool = False,
        shared: bool = False,
        on_device: bool = False,
        links: Iterable[Link] | None = None,
    ) -> None:
        self._message_bytes, self._chunks, self._on_device = message_bytes, chunks, on_device
        self._hosts, self._rendezvous = hosts, rendezvous
        # A message whose sender's and receiver's threads wait for a core looks like one on its way.
        self._floor = 2 * TIME_SLICE if shared else 0.0
        # Where threads wait for a core, many a message does; a slow link delays all of them.
        self._crowded = on_device or shared
        self.charts: dict[Link, DelayChart] = {}
        self.samples: dict[Link, float] = {}
        self._models: dict[Link, LinkModel] = {}
        self._excesses: dict[Link, Excess] = {}
        self._excess: dict[Link, float] = {}  # seconds now, of Megatron's messages over ours
        self._stage_seconds = 0.0
        self._planned: dict[Link, float] = {}  # seconds for its bytes, planned for
        self._ports: dict[int, PortModel] = {}
        self._planned_ports: dict[int, float] = {}
        for link in _of_pipeline(list(hosts), chunks) if links is None else links:
            self.watch(link)

    def watch(self, link: Link) -> None:
        """Take in another `link`, if it is a new one."""
        if link not in self.charts:
            self.charts[link] = DelayChart(self._floor)
            self._models[link], self._excesses[link] = LinkModel(), Excess()
            self._excess[link] = self._planned[link] = 0.0

    def forget(self, link: Link) -> None:
        """Drop all that is known of a `link`."""
        for rows in (self.charts, self._models, self._excesses, self._excess, self._planned):
            rows.pop(link, None)

    def update(self, reports: Sequence[StageReport], stage_seconds: float) -> list[Link]:
        """Take an iteration's `reports`, one per worker; return links whose change is confirmed.

        `stage_seconds`: what a microbatch takes on the slowest worker.
        """
        self._stage_seconds = stage_seconds
        samples = {(s, r.worker): sample for r in reports for s, sample in r.links.items()}
        self._take_busy(reports, samples)
        probed = {
            link: Seen(one.probed, one.probed)
            for link, one in samples.items()
            if one.probed is not None
        }
        if all(report.ops for report in reports):  # it ran over Megatron's own messages
            delays = self._of_stock(probed, stock_links(reports, self._chunks, self._floor > 0))
        else:
            delays = self._of_ours(probed, samples)
        self.samples = {a: max(0.0, x) for a, x in delays.items() if x <= LONGEST}
        changed = [
            link
            for link, chart in self.charts.items()
            if link in self.samples and chart.update(self.samples[link], stage_seconds)
        ]
        # Whether bytes or a port cause a delay takes some more iterations to find out.
        found = self._changed_ports()
        return changed + [
            link
            for link in self.charts
            if link not in changed and (not found.isdisjoint(link) or self._apart(link))
        ]

    def _apart(self, link: Link) -> bool:
        """Return whether a slow link's seconds for bytes are no longer those planned for."""
        chart, change = self.charts[link], abs(self.wire(link) - self._planned[link])
        least = max(ABSOLUTE * self._stage_seconds, self._floor)
        slow = chart.level is not None and chart.level >= least
        return slow and not self._on_device and change >= max(least, RELATIVE * chart.estimate)

    def accept(self) -> None:
        """Note that the plan in force is made for the links as they are now."""
        for link, chart in self.charts.items():
            if chart.level is not None:
                chart.accept(self._stage_seconds)
                self._planned[link] = self.wire(link)
        self._planned_ports = self.ports()

    def ports(self) -> dict[int, float]:
        """Return, by worker with a thin port, the bytes per second that it passes each way.

        All links of such a worker are thin, and none passes much more than another one. Messages
        that meet show whether links share a port. If none show it, a port is the likeliest reason
        where links of no other worker are as thin.
        """
        found = {}
        for worker, model in self._ports.items():
            wires = self._wires(worker)
            if not 0 < max(wires, default=0.0) <= ALIKE * min(wires):
                continue
            others = (self.wire(link) for link in self.charts if worker not in link)
            alike = any(ALIKE * wire >= min(wires) for wire in others)
            if model.shared or (model.silent and not alike):
                # Computing makes messages late, never early: the higher rate is nearer the truth.
                found[worker] = max(model.rate, self._message_bytes / min(wires))
        return found

    def _wires(self, worker: int) -> list[float]:
        """Return the `wire` of each link of a `worker`; [] where it has fewer than _BETWEEN."""
        links = [link for link in self.charts if worker in link]
        return [self.wire(link) for link in links] if len(links) >= _BETWEEN else []

    def _changed_ports(self) -> set[int]:
        """Return the workers whose port is not as planned for."""
        now, planned = self.ports(), self._planned_ports
        return now.keys() ^ planned.keys() | {
            worker
            for worker in now.keys() & planned.keys()
            if abs(now[worker] - planned[worker]) > RELATIVE * planned[worker]
        }

    @property
    def stock_measured(self) -> bool:
        """True where a link's seconds are known for Megatron's own messages, apart from ours."""
        return any(self._excess.values())

    def delay(self, link: Link, native: bool) -> float:
        """Return the seconds of a `link` for our messages, or (`native`) for Megatron's."""
        excess = self._excess[link]  # charts have the longer of both
        shorter = max(0.0, -excess if native else excess)
        return max(0.0, self.charts[link].estimate - shorter)

    def state(self, link: Link, native: bool) -> LinkState:
        """Return the state of a `link` for our messages, or (`native`) for Megatron's."""
        seconds = self.delay(link, native)
        if native and self._on_device:
            return LinkState(seconds)
        seconds = self._models[link].as_ours(seconds, self._message_bytes)
        wire = self.wire(link)
        if not wire:
            return LinkState(seconds)
        delay, bandwidth = max(0.0, seconds - wire), self._message_bytes / wire
        ports = self.ports()
        if rates := [ports[worker] for worker in link if worker in ports]:
            # A wait for messages of another link is due to the port, not to this link.
            small = {way: self._models[way].small() for way in (link, link[::-1])}
            seen = {way: Seen(one, one) for way, one in small.items() if one is not None}
            alone = on_the_way(link, seen, self._hosts)
            delay = delay if alone is None else min(delay, max(0.0, alone))
            bandwidth = max(bandwidth, *rates)
        return LinkState(delay, bandwidth)

    def wire(self, link: Link) -> float:
        """Return the seconds that our message keeps a `link` busy; 0 where they do not matter."""
        seconds = self._models[link].wire(self._message_bytes)
        return seconds if seconds >= max(THIN * self._stage_seconds, self._floor) else 0.0

    def _of_ours(
        self, probed: Mapping[Link, Seen], samples: Mapping[Link, LinkSample]
    ) -> dict[Link, float]:
        """Return the seconds per link, by our messages.

        Where Megatron's messages were once measured to take longer, the excess is added. A link
        that carries none of ours now is measured by probes, whose receives are posted in advance.
        """
        each = ((link, seen_by_messages(one, self._crowded)) for link, one in samples.items())
        carried = {link: one for link, one in each if one is not None}
        seen, found = {**probed, **carried}, {}
        delay_of = without_handshake if self._rendezvous else on_the_way
        for link in self.charts:
            if (delay := delay_of(link, seen, self._hosts)) is not None:
                if link not in carried:  # a small message shows nothing of what bytes take
                    delay += self._models[link].wire(self._message_bytes)
                stock = self._models[link].as_stock(delay, self._message_bytes)
                self._excess[link] = excess = self._excesses[link].believed(stock)
                found[link] = stock + max(0.0, excess)
        return found

    def _of_stock(
        self, probed: Mapping[Link, Seen], theirs: Mapping[Link, Seen]
    ) -> dict[Link, float]:
        """Return, by link, the longer of the seconds of our probes and of Megatron's messages."""
        matters, found = ABSOLUTE * self._stage_seconds, {}
        for link in self.charts:
            ours = on_the_way(link, probed, self._hosts)
            stock = on_the_way(link, theirs, self._hosts)
            if ours is not None:
                least = ours
                ours += self._models[link].wire(self._message_bytes)  # however little it is
                if (
                    stock is not None
                    and max(stock, least) < matters
                    and not self.charts[link].alarm
                ):
                    self._models[link].while_well(stock, least)
                ours = self._models[link].as_stock(ours, self._message_bytes)
            if ours is not None and stock is not None:
                self._excess[link] = self._excesses[link].measure(stock, ours, matters)
            if known := [seconds for seconds in (ours, stock) if seconds is not None]:
                found[link] = max(known)
        return found

    def _take_busy(
        self, reports: Sequence[StageReport], samples: Mapping[Link, LinkSample]
    ) -> None:
        """Take the seconds that our messages of several sizes kept links and ports busy."""
        for link, sample in samples.items():
            if sample.probed is not None and (model := self._models.get(link)):
                model.add(sample.probed, sample.busy)
        for report in reports:
            wires = self._wires(report.worker)
            if not wires or not min(wires):
                self._ports.pop(report.worker, None)
            elif report.port is not None:
                self._ports.setdefault(report.worker, PortModel()).add(report.port)


def _of_pipeline(workers: Sequence[int], chunks: int) -> list[Link]:
    """Return the links between neighbours, both ways; several chunks make the workers a ring."""
    pairs = list(pairwise(workers))
    if chunks > 1 and len(workers) > 2:
        pairs.append((workers[-1], workers[0]))
    return [link for a, b in pairs for link in ((a, b), (b, a))]


class LinkModel:
    """A link model converts between seconds of our messages and Megatron's on a directed link.

    Our messages leave the GPU by way of the host, so one of them may take ten times as long as
    NCCL's on a healthy link. A link that slows down delays both by as much: that shows what the
    kind that is not in use takes.
    """

    def __init__(self) -> None:
        self._fit = LinkFit()
        self._thin = False
        self._slope: float | None = None  # of the last iteration, seconds per byte
        self._theirs: deque[float] = deque(maxlen=WELL)
        self._small: deque[float] = deque(maxlen=WELL)
        self._slopes: deque[float] = deque(maxlen=WELL)

    def add(self, small: float, busy: Iterable[Sample]) -> None:
        """Take what our messages took in an iteration.

        Args:
            small: seconds that a small one took.
            busy: by size, the seconds beyond `small` that larger ones kept the link busy.
        """
        row = [Sample(0.0, small), *(Sample(n, small + s) for n, s in busy)]
        self._slope = slope_of(row)
        self._fit.add(row)
        if (fit := self._fit.fit()) is not None:
            self._thin = fit.sure or (self._thin and fit.likely)

    def wire(self, nbytes: float) -> float:
        """Return the seconds that our message of `nbytes` keeps the link busy; 0 if not known."""
        fit = self._fit.fit()
        return nbytes * fit.per_byte if fit is not None and self._thin else 0.0

    def small(self) -> float | None:
        """Return a small message's seconds, with the difference of clocks; None if not known."""
        fit = self._fit.fit()
        return None if fit is None else fit.delay

    def while_well(self, theirs: float, small: float) -> None:
        """Note the seconds of Megatron's message, `theirs`, and of a `small` one on a healthy link.

        For larger ones of ours the last known slope is noted, too: few iterations show one, and
        only a later one may show for sure that the link is thin.
        """
        self._theirs.append(theirs)
        self._small.append(small)
        if self._slope is not None:
            self._slopes.append(self._slope)

    def as_stock(self, ours: float, nbytes: float) -> float:
        """Return the seconds of Megatron's message of `nbytes` where ours takes `ours` seconds."""
        if not self._small:
            return ours
        return median(self._theirs) + max(0.0, ours - self._ours(nbytes))

    def as_ours(self, theirs: float, nbytes: float) -> float:
        """Reverse `as_stock`: return our seconds for `nbytes` where Megatron's are `theirs`."""
        if not self._small:
            return theirs
        return self._ours(nbytes) + max(0.0, theirs - median(self._theirs))

    def _ours(self, nbytes: float) -> float:
        """Return our message's seconds on a healthy link; `nbytes` count if they do in `wire`."""
        slope = max(0.0, median(self._slopes)) if self._thin and self._slopes else 0.0
        return median(self._small) + slope * nbytes
