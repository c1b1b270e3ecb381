"""The earliest moment at which each op of a job can start, in whatever order a schedule runs them.

Microbatches are alike, so F(k) stands for the k-th forward in *time* at a position of the model
(chunk c of stage s is position c * stages + s), and I(k), W(k) for the k-th halves of a backward,
k from 0. Where backwards are not split, I is all of it and W takes no time; where they are, a full
backward counts as its I and its W, which only sends the gradient and frees memory earlier; where it
takes less than both, they count as much. Any schedule then obeys three rules, and `earliest` finds
times that follow from them.

*Order.* The first k + 1 ops at a position each follow the op of their microbatch at the position
they depend on. So the k-th here follows the k-th there, and its message; and the messages of a
link arrive no closer to each other than the bytes of one take.

*Memory*, in halves of what one microbatch holds of one chunk: F takes two, I and W give back one
each. When F(k) of chunk c starts, it makes k + 1 forwards, or more, on each chunk up to c, and what
the other chunks hold is not less than nothing: at least 2 (c + 1)(k + 1) - room halves have been
given back on the chunks up to c. At least half of these are I, as W follows I, and they are I(j)
with j < k.

*Machine.* Let the ops of a stage that can start before a time t take n seconds in all. An op that
cannot start before t, and that ops of N seconds precede, starts no earlier than t + N - n, as the
stage runs one op at a time (one machine with release dates: Carlier, "The one-machine sequencing
problem", EJOR 11, 1982). So of all times t, the one with the greatest t - n is all to remember.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Starts(NamedTuple):
    """[microbatch, chunk, stage]: when F, and I, can start at the earliest."""

    forward: Floats
    backward: Floats


class Job:
    """The costs of Conditions as arrays: [stage] for ops, [chunk, stage] for positions."""

    def __init__(self, conditions: Conditions) -> None:
        c = conditions
        self.count, self.chunks, self.stages = c.microbatches, c.chunks, c.stages
        self.most = 2 * c.microbatches * c.chunks  # halves that a stage can ever hold
        costs = [[c.seconds(kind, s) for s in range(c.stages)] for kind in Kind]
        seconds = dict(zip(Kind, np.array(costs) / c.chunks, strict=True))
        self.forward, self.again, whole = seconds[Kind.F], seconds[Kind.R], seconds[Kind.B]
        self.early, self.late = whole, np.zeros(c.stages)
        if c.split:  # in one piece or in two, whichever takes less
            self.early = np.minimum(seconds[Kind.I], whole)
            self.late = np.minimum(seconds[Kind.I] + seconds[Kind.W], whole) - self.early
        shape, last = (c.chunks, c.stages), c.chunks * c.stages - 1
        # Seconds on the wire, and in all, of the message that F (0), or I (1), of a position needs.
        self.wire, self.lag = np.zeros((2, last + 1)), np.zeros((2, last + 1))
        self.sent: dict[tuple[int, int], list[tuple[int, int]]] = {}  # link -> (0 or 1, position)
        for x in range(last):
            for kind, source, target in ((0, x, x + 1), (1, x + 1, x)):
                way = source % c.stages, target % c.stages
                if way[0] != way[1]:
                    self.wire[kind, target] = c.passes(*way)
                    self.lag[kind, target] = c.message_seconds(*way)
                    self.sent.setdefault(way, []).append((kind, source))
        forward, early = np.tile(self.forward, c.chunks), np.tile(self.early, c.chunks)
        down = np.cumsum(self.lag[0] + np.append(0.0, forward[:-1]))
        up = np.cumsum((self.lag[1] + np.append(early[1:], 0.0))[::-1])[::-1]
        home = np.zeros(last + 1)
        home[0] = self.late[0]
        for x in range(1, last + 1):
            s, above = x % c.stages, (x - 1) % c.stages
            home[x] = max(self.late[s], self.lag[1, x - 1] + self.early[above] + home[x - 1])
        # Seconds of a microbatch with nothing in its way: from the model's first F to a position's
        # (down), from the last position's I to a position's (up), from F to I at a position (turn),
        # and from the end of I there to the microbatch's end (home).
        self.down, self.up = down.reshape(shape), up.reshape(shape)
        self.turn = (down[-1] - down + forward[-1] + up).reshape(shape)
        self.home = home.reshape(shape)

    def room(self, conditions: Conditions) -> Ints:
        """Per stage, the halves that its budget holds."""
        # As `check` does, forgive what rounding adds.
        halves = (2 * budget * self.chunks + 1e-6 for budget in conditions.activation_budget)
        return np.array([int(min(h, self.most)) for h in halves])


def earliest(
    job: Job,
    room: Ints,
    known: Starts | None = None,
    linked: tuple[bool, bool] = (True, True),
    turn: Floats | None = None,
) -> Starts:
    """The earliest starts on stages of that `room`, none before those `known`.

    `linked`: whether F, and I, wait for the adjacent stages here, or did so in `known`. `turn`:
    seconds from F to I, by default the way to the end of the model and back.
    """
    if known is None:
        known = Starts(
            *(at + np.zeros((job.count, 1, 1)) for at in (job.down, job.down + job.turn))
        )
        if job.chunks > 1 and (room < job.most).any():
            # A row counts later microbatches of other chunks by what is known of them at its time.
            known = earliest(job, np.full_like(room, job.most))
    rows = _Rows(job, room, known, linked, job.turn if turn is None else turn)
    for k in range(job.count):
        rows.forwards(k)
        rows.look_back(k)
        rows.backwards(k)
    return Starts(rows.forward, rows.backward)


class _Rows:
    """The starts, completed one microbatch after another."""

    def __init__(
        self, job: Job, room: Ints, known: Starts, linked: tuple[bool, bool], turn: Floats
    ) -> None:
        self.job, self.room, self.linked, self.turn = job, room, linked, turn
        self.forward, self.backward = known.forward.copy(), known.backward.copy()
        self.arrived = np.full_like(job.wire, -np.inf)  # when the last message was there
        limited = room[room < job.most]
        self.first = int(limited.min()) // (2 * job.chunks) if limited.size else job.count
        # The rule of the machine: the greatest t - n, which a stage must have idled. There is no
        # work before the first F.
        self.idle = job.down[0].copy()
        self.before = _Before(), _Before(), _Before()

    def forwards(self, k: int) -> None:
        """Compute F(k) at all positions."""
        job, row = self.job, self.forward[k]
        if k < self.first:
            done = job.chunks * (k + 1) - 1
            np.maximum(row[-1], self.idle + self.work(done, 0, 0), out=row[-1])
        else:
            for chunk in range(job.chunks):
                np.maximum(row[chunk], self.freed(k, chunk), out=row[chunk])
        self.pass_on(0, k)
        rows = slice(k, self.reach(k + 1))
        np.maximum(self.backward[rows], self.forward[rows] + self.turn, out=self.backward[rows])

    def freed(self, k: int, chunk: int) -> Floats:
        """Return when enough of I and W are done for F(k) of a `chunk`."""
        job, n = self.job, chunk + 1
        due = np.maximum(0, 2 * n * (k + 1) - self.room)
        least = (due + 1) // 2
        # On every stage, the I(j) with j < low are among the `least` that start first.
        low, stages = max(0, k - int(self.room.max()) // 2), np.arange(job.stages)
        starts = self.backward[low:k, :n].reshape(-1, job.stages)
        if chunk:
            starts = np.sort(starts, 0)

        def start(count: Ints) -> Floats:
            """Return when the last of the first `count` I starts; 0 for none."""
            return np.where(count > 0, starts[np.maximum(count - n * low - 1, 0), stages], 0.0)

        if n < job.chunks:
            return np.where(least > 0, start(least) + job.early, 0.0)
        moment, before = start(least), np.maximum(least - 1, 0)
        forwards = self.before[0](self.forward[: self.reach(k)], moment).sum(0)
        self.remember(moment, self.work(forwards, before, before))
        # Where W takes longer, giving back more with I and less with W may be faster.
        most = np.where(job.late > job.early, np.minimum(due, n * k), least)
        given = np.minimum(least + np.arange(int((most - least).max()) + 1)[:, None], most)
        done = self.work(n * (k + 1) - 1, given, np.maximum(0, due - given))
        freed = np.where(given > 0, start(given) + job.early, 0.0)
        soonest: Floats = np.maximum(freed, self.idle + done).min(0)
        return soonest

    def look_back(self, k: int) -> None:
        """Update `idle` by the ops that can start before F(k) of the last chunk, W with its I."""
        moment, rows = self.forward[k, -1], self.reach(k)
        forwards = self.before[1](self.forward[:rows], moment).sum(0)
        backwards = self.before[2](self.backward[:rows], moment).sum(0)
        self.remember(moment, self.work(forwards, backwards, backwards))

    def backwards(self, k: int) -> None:
        """Compute I(k) at all positions; on chunk 0, every F and I up to k precedes it."""
        job, row = self.job, self.backward[k]
        done = job.chunks * (k + 1)
        due = np.maximum(0, 2 * done - self.room - job.chunks * k)  # beyond what I gave back
        np.maximum(row[0], self.idle + self.work(done, done - 1, due), out=row[0])
        self.pass_on(1, k)

    def remember(self, moment: Floats, work: Floats) -> None:
        np.maximum(self.idle, moment - work, out=self.idle)

    def work(self, forwards: Ints | int, backwards: Ints | int, weights: Ints | int) -> Floats:
        """Seconds of so many F, I and W."""
        job = self.job
        seconds: Floats = job.forward * forwards + job.early * backwards + job.late * weights
        return seconds

    def pass_on(self, kind: int, k: int) -> None:
        """The rule of order: what follows from row k of F (0) or I (1), in it and below it."""
        job, starts = self.job, (self.forward, self.backward)[kind]
        row, hops, wire = starts[k], (job.down, job.up)[kind], job.wire[kind]
        seconds = (job.forward, job.early)[kind]
        linked, onward = self.linked[kind], slice(None, None, -1 if kind else 1)
        narrow = linked and bool(wire.any())
        if narrow:
            np.maximum(row, (self.arrived[kind] + wire).reshape(row.shape), out=row)
        # Along all positions, or along the chunks of each stage.
        waits = (row - hops).reshape((-1, 1) if linked else row.shape)[onward]
        row[:] = np.maximum.accumulate(waits, 0)[onward].reshape(row.shape) + hops
        if narrow:
            sent = (row + seconds).ravel()[onward]
            latest = np.append(-np.inf, sent[:-1])[onward] + job.lag[kind]
            self.arrived[kind] = np.maximum(self.arrived[kind] + wire, latest)
        below = starts[k + 1 : self.reach(k + 2)]
        steps = np.arange(1, 1 + len(below))[:, None, None]
        np.maximum(below, row + steps * seconds, out=below)

    def reach(self, k: int) -> int:
        """Return how many rows matter to row k - 1: with chunks all, as their order may differ."""
        return self.job.count if self.job.chunks > 1 else k


class _Before:
    """How many starts at each position lie before a moment; it never moves back."""

    def __init__(self) -> None:
        self.low = 0

    def __call__(self, starts: Floats, moment: Floats) -> Ints:
        found: Ints = self.low + (starts[self.low :] < moment).sum(0)
        self.low = int(found.min())
        return found
