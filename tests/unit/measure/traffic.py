"""Made-up traffic between two stages, with delays as real links have them.

A message takes `base` seconds times a lognormal jitter, one of a hundred five times as long, and in
one iteration of thirty there is a burst: two to six messages in a row take about four times as
long. A link puts out one message after another, and they keep their order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.measure.iteration_record import IterationRecord, OpTime
from megatron_adaptra.measure.link_probe import NBYTES
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.transport.base import Stamps

MS = 1e-3


@dataclass
class Link:
    """One direction. `delay` and `bandwidth`: what it is slower by; see the module for the rest."""

    rng: random.Random
    base: float
    delay: float = 0.0
    bandwidth: float = math.inf
    sigma: float = 0.25
    spikes: float = 0.01  # share of messages
    bursts: float = 0.002  # the same, that begin one
    _burst: float = 1.0
    _left: int = 0  # messages of a burst
    _free: float = 0.0
    _last: float = 0.0

    def send(self, sent: float, nbytes: int) -> Stamps:
        """What the receiver notes of a message."""
        rng = self.rng
        if self._left == 0 and rng.random() < self.bursts:
            self._left, self._burst = rng.randint(2, 6), 4.0 * rng.lognormvariate(0.0, 0.5)
        late = self.base * rng.lognormvariate(0.0, self.sigma)
        if self._left > 0:
            self._left -= 1
            late *= self._burst
        late *= 5.0 if rng.random() < self.spikes else 1.0
        self._free = max(sent, self._free) + nbytes / self.bandwidth
        self._last = max(self._last, self._free + self.delay + late)
        return Stamps(sent, sent - 1.0, self._last, eager=True, nbytes=nbytes)


@dataclass
class Traffic:
    """Iterations of two stages with `count` microbatches, each of `stage` seconds.

    `there`, `back`: the links; `nbytes`: of a message. `together`: messages are sent at once.
    """

    there: Link
    back: Link
    stage: float
    nbytes: int = 1 << 20
    count: int = 16
    together: bool = False
    _now: float = field(default=1.0)

    def reports(self) -> Iterator[list[StageReport]]:
        """Of one iteration after another."""
        iteration = 0
        while True:
            yield [record.report() for record in self._records(iteration)]
            iteration += 1

    def _records(self, iteration: int) -> list[IterationRecord]:
        records = [IterationRecord(stage, iteration, self._now) for stage in range(2)]
        self._probe(records)
        for i in range(self.count):
            for record in records:
                half = self._now + self.stage / 2
                record.ops += [
                    OpTime(Op(Kind.F, i), self._now, half, 0.0),
                    OpTime(Op(Kind.B, i), half, half + self.stage / 2, 0.0),
                ]
            for link, target, kind in ((self.there, 1, Kind.F), (self.back, 0, Kind.B)):
                stamps = link.send(self._now, self.nbytes)
                records[target].messages.append((1 - target, Op(kind, i), stamps))
            self._now += 0.0 if self.together and i < self.count / 2 else self.stage
        self._now += 1.0  # the step
        self._probe(records)
        return records

    def _probe(self, records: list[IterationRecord]) -> None:
        for link, target in ((self.there, 1), (self.back, 0)):
            records[target].probed.append((1 - target, link.send(self._now, NBYTES)))


def healthy(rng: random.Random, base: float, stage: float, delay: float = 0.0) -> Traffic:
    """Both links are well, and as long as `delay`."""
    return Traffic(Link(rng, base, delay), Link(rng, base, delay), stage)
