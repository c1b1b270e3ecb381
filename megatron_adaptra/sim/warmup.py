"""The clock of warmup schedules: the seconds of `simulate`, to the last bit, but far sooner.

A stage runs `depth` forwards, then backward and forward in turn, then the backwards that are left.
With a device per stage, the order of all this is known beforehand, so one pass over the ops
replaces the event queue. A planner asks thousands of times.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.posting import works_of
from megatron_adaptra.ir.program import links_ahead, lower_line
from megatron_adaptra.ir.routes import Routes
from megatron_adaptra.ir.schedule import warmup_line
from megatron_adaptra.sim.clock import Clock, Step, compile_line


class WarmupClock:
    """Seconds of an iteration as a function of the warmup depths (see `lower` for the posts).

    `sends`: "eager" or "rendezvous".
    """

    def __init__(self, conditions: Conditions, sends: str = "eager") -> None:
        self.conditions, self.rendezvous = conditions, sends == "rendezvous"
        # Other ops may have to wait: only the event queue knows which comes first.
        self.contended = conditions.shared or bool(conditions.ports)
        stages = range(conditions.stages)
        self.backward = [conditions.seconds(Kind.B, s) for s in stages]
        self.down = [self._link(s - 1, s) for s in stages]  # what stage s gets activations over
        self.up = [self._link(s + 1, s) for s in stages]  # what stage s gets gradients over
        self.lines: dict[tuple[int, tuple[int, ...]], list[Step]] = {}

    def seconds(self, depths: Sequence[int]) -> float:
        """Return the seconds for `depths`: 1 to microbatches, never rising from stage to stage."""
        return self._by_events(depths) if self.contended else self._one_pass(depths)

    @property
    def cost_factor(self) -> int:
        """The time per op of this clock, measured, in multiples of its quickest case."""
        return 10 if self.contended else 2 if self.rendezvous else 1

    def _one_pass(self, depths: Sequence[int]) -> float:
        # Round r runs forward depth + r of every stage, downwards, then backward r + 1, upwards:
        # an order in which each op finds what it needs, as depths never increase.
        count, stages, rendezvous = self.conditions.microbatches, len(depths), self.rendezvous
        ahead = links_ahead(depths)
        now = [0.0] * stages
        down_free, up_free = [0.0] * stages, [0.0] * stages
        forwards: list[list[float]] = [[] for _ in depths]  # when each forward ended
        # Only rendezvous asks when receives were posted: the first ones at once, each further one
        # when the stage came to the op that uses the oldest one outstanding.
        posted_f = [[0.0] * ahead.get((s - 1, s), 0) for s in range(stages)]
        posted_b = [[0.0] * ahead.get((s + 1, s), 0) for s in range(stages)]
        down = list(enumerate(zip(self.conditions.forward, self.down, strict=True)))
        up = list(enumerate(zip(self.backward, self.up, strict=True)))[::-1]
        for round_ in range(-depths[0], count):
            for s, (seconds, (delay, wire, word)) in down:
                k = depths[s] + round_
                if not 0 <= k < count:
                    continue
                t = now[s]
                if s:
                    ready = forwards[s - 1][k]
                    if rendezvous:
                        posted_f[s].append(t)
                        allowed = posted_f[s][k] + word
                        if allowed > ready:
                            ready = allowed
                    if down_free[s] > ready:
                        ready = down_free[s]
                    down_free[s] = ready = ready + wire
                    ready += delay
                    if ready > t:
                        t = ready
                now[s] = t = t + seconds
                forwards[s].append(t)
            k = round_ + 1
            if not 0 <= k < count:
                continue
            below = 0.0  # when the stage below ended this backward
            for s, (seconds, (delay, wire, word)) in up:
                t = now[s]
                if s + 1 < stages:
                    ready = below
                    if rendezvous:
                        posted_b[s].append(t)
                        allowed = posted_b[s][k] + word
                        if allowed > ready:
                            ready = allowed
                    if up_free[s] > ready:
                        ready = up_free[s]
                    up_free[s] = ready = ready + wire
                    ready += delay
                    if ready > t:
                        t = ready
                now[s] = below = t + seconds
        return max(now) + self.conditions.step_seconds

    def _by_events(self, depths: Sequence[int]) -> float:
        """Run the event queue, for shared cores or ports; each line is compiled once."""
        lines = []
        for s, depth in enumerate(depths):
            around = tuple(depths[max(0, s - 1) : s + 2]) if self.rendezvous else (depth,)
            if (s, around) not in self.lines:
                count, routes = self.conditions.microbatches, Routes(len(depths))
                works = works_of(warmup_line(depth, count), s, routes)
                line = lower_line(works, links_ahead(depths))
                self.lines[s, around] = compile_line(
                    line, s, self.conditions, routes, self.rendezvous
                )
            lines.append(self.lines[s, around])
        return Clock(lines, self.conditions, self.rendezvous).run() + self.conditions.step_seconds

    def _link(self, source: int, target: int) -> tuple[float, float, float]:
        """Return a message's delay, its seconds on the wire, and the delay of the word back."""
        c = self.conditions
        delay, back = c.link(source, target).delay, c.link(target, source).delay
        return delay, c.wire(source, target), back
