"""The pipeline as a job shop: stages are machines, ops have numbers, a plan is a line per stage.

The searches share it: costs by op number, the one message each op waits for, the change of the
stage's memory by each op, and the times that follow from an order. Sends are eager and every stage
has a device of its own. Its port limits what it sends, but not what two others send to it at once;
that, and other transports, are judged by `sim` in the end.

Microbatches are alike, so on every stage the forwards of a chunk may run in their order, and so may
the backwards: exchanging two numbers in any schedule that does otherwise changes no time. Weight
gradients then add up in microbatch order too, which keeps losses bit-identical to stock Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import INPUT_HALF, RECOMPUTED_SHARE, Line, Schedule

FORWARD, BACKWARD, WEIGHT, RECOMPUTE = range(4)  # BACKWARD: its input half where it is split
ROOM = 1e-9  # of one microbatch's activations; sums of halves and twentieths are not exact

Order = list[list[int]]  # per stage, the numbers of its ops
Way = tuple[int, int]  # of a link, the stages; of the port that a stage sends by, twice the stage


@dataclass(frozen=True)
class Timing:
    """A timing has each op's end, by number (negative: not run), and an order to start them in."""

    end: list[float]
    sequence: list[int]
    makespan: float


def exact_times(conditions: Conditions, sends: str) -> bool:
    """Return whether a shop's times are those of the simulator under such `sends`.

    A shop replaces a whole backward by its two halves.
    """
    halves = not conditions.split or not conditions.backward
    return sends == "eager" and not (conditions.shared or conditions.ports) and halves


class JobShop:
    """A job shop numbers ops: ((chunk * stages + stage) * 4 + kind) * microbatches + microbatch.

    An `op` is such a number, an `order` a list of them per stage, a `position` chunk * stages +
    stage, a `kind` one of FORWARD, BACKWARD, WEIGHT and RECOMPUTE.
    """

    def __init__(self, conditions: Conditions) -> None:
        c = self.conditions = conditions
        self.stages, self.count, self.chunks = c.stages, c.microbatches, c.chunks
        self.split, self.budget = c.split, c.activation_budget
        self.positions = self.stages * self.chunks
        self.share = 1 / self.chunks
        size = 4 * self.positions * self.count
        self.seconds = [0.0] * size
        self.producer = [-1] * size  # the op of another position whose output an op needs
        self.consumer = [-1] * size  # the op of another position that needs an op's output
        self.lag = [0.0] * size  # by op, seconds from its producer's end to the arrival here
        # By link whose messages take time for their bytes: the seconds, and the queue's key.
        self.wires: dict[Way, tuple[float, Way]] = {}
        for x in range(self.positions):
            self._position(x)

    def _position(self, x: int) -> None:
        c, stage, count = self.conditions, x % self.stages, self.count
        kinds = (Kind.F, Kind.I if self.split else Kind.B, Kind.W, Kind.R)
        for number, kind in enumerate(kinds):
            cost = c.seconds(kind, stage)
            first = self.number(x, number, 0)
            self.seconds[first : first + count] = [cost * self.share] * count
        for k in range(count):
            if x:
                self._link(self.number(x - 1, FORWARD, k), self.number(x, FORWARD, k))
            if x + 1 < self.positions:
                self._link(self.number(x + 1, BACKWARD, k), self.number(x, BACKWARD, k))

    def _link(self, maker: int, user: int) -> None:
        source, target = self.stage_of(maker), self.stage_of(user)
        self.producer[user], self.consumer[maker] = maker, user
        if source != target:
            self.lag[user] = self.conditions.message_seconds(source, target)
            if (wire := self.conditions.passes(source, target)) > 0:
                to = source if source in self.conditions.ports else target
                self.wires[source, target] = wire, (source, to)

    def number(self, position: int, kind: int, microbatch: int) -> int:
        """Return the number of the op of that `kind` and `microbatch` at a `position`."""
        return (position * 4 + kind) * self.count + microbatch

    def kind_of(self, op: int) -> int:
        """Return FORWARD, BACKWARD, WEIGHT or RECOMPUTE."""
        return op // self.count % 4

    def stage_of(self, op: int) -> int:
        """Return the stage that runs an op."""
        return op // (4 * self.count) % self.stages

    def holds(self, recomputed: frozenset[int] | set[int]) -> list[float]:
        """Return what each op adds to its stage's memory; `recomputed`: the R ops that are run."""
        step, count = 4 * self.count, self.count
        full = (1.0, -INPUT_HALF if self.split else -1.0, INPUT_HALF - 1.0, 1.0 - RECOMPUTED_SHARE)
        out: list[float] = []
        for _ in range(self.positions):
            for change in full:
                out += [change * self.share] * count
        for op in recomputed:
            out[op // step * step + op % count] = RECOMPUTED_SHARE * self.share
        return out

    def peaks(self, order: Sequence[Sequence[int]]) -> list[float]:
        """Return, per stage, the most activations held at once, in microbatches."""
        recomputed = {op for line in order for op in line if self.kind_of(op) == RECOMPUTE}
        change, out = self.holds(recomputed), []
        for line in order:
            held = most = 0.0
            for op in line:
                held += change[op]
                if held > most:
                    most = held
            out.append(most)
        return out

    def time(self, order: Sequence[Sequence[int]]) -> Timing | None:
        """Time each op, started as soon as it can be; None if some never can."""
        seconds, producer, lag, stages = self.seconds, self.producer, self.lag, self.stages
        end = [-1.0] * len(seconds)
        at, now = [0] * stages, [0.0] * stages
        sequence: list[int] = []
        append, narrow = sequence.append, bool(self.wires)
        free: dict[Way, float] = {}
        arrival: dict[int, float] = {}
        down, up = range(stages), range(stages - 1, -1, -1)
        total = sum(map(len, order))
        while True:
            ran = len(sequence)
            for sweep in (down, up):
                for stage in sweep:
                    line, i, t = order[stage], at[stage], now[stage]
                    for op in line[i:] if i else line:
                        maker = producer[op]
                        if maker >= 0:
                            ready = end[maker]
                            if ready < 0.0:
                                break
                            ready += lag[op]
                            if narrow and arrival.get(op, 0.0) > ready:
                                ready = arrival[op]
                            if ready > t:
                                t = ready
                        t += seconds[op]
                        end[op] = t
                        append(op)
                        i += 1
                        if narrow and self.consumer[op] >= 0:
                            self._send(op, t, free, arrival)
                    at[stage], now[stage] = i, t
            if len(sequence) == total:
                return Timing(end, sequence, max(now))
            if len(sequence) == ran:
                return None

    def _send(self, op: int, t: float, free: dict[Way, float], arrival: dict[int, float]) -> None:
        """Send `op`'s output: messages of a link, or port, go one by one at its bandwidth."""
        user = self.consumer[op]
        link = self.stage_of(op), self.stage_of(user)
        if link in self.wires:
            wire, queue = self.wires[link]
            free[queue] = left = max(free.get(queue, 0.0), t) + wire
            arrival[user] = left + self.conditions.link(*link).delay

    # --- to and from schedules -------------------------------------------------------------------

    def order_of(self, schedule: Schedule) -> Order:
        """Return the numbers of a schedule's ops; where backwards are split, B is I and W."""
        kinds = {Kind.F: FORWARD, Kind.B: BACKWARD, Kind.I: BACKWARD, Kind.R: RECOMPUTE}
        out: Order = []
        for stage, line in enumerate(schedule.order):
            row: list[int] = []
            for op in line:
                x = op.chunk * self.stages + stage
                row.append(self.number(x, kinds.get(op.kind, WEIGHT), op.microbatch))
                if op.kind is Kind.B and self.split:
                    row.append(self.number(x, WEIGHT, op.microbatch))
            out.append(row)
        return out

    def lines(self, order: Sequence[Sequence[int]]) -> tuple[Line, ...]:
        """Return the ops of an `order` as a schedule's lines have them."""
        kinds = (Kind.F, Kind.I if self.split else Kind.B, Kind.W, Kind.R)
        count, block = self.count, 4 * self.count

        def op(n: int) -> Op:
            chunk = n // block // self.stages
            return Op(kinds[n // count % 4], n % count, chunk)

        return tuple(tuple(op(n) for n in line) for line in order)
