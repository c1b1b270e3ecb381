"""The discrete-event clock: how long a program takes under given conditions.

Links: a message may leave when it is sent (*eager*), or once it is sent and the word that its
receive is posted has come over the reverse link (*rendezvous*, as gloo does it). Messages of one
directed link go one after another at its bandwidth; each arrives `delay` seconds after its last
byte left.

Stages that share a machine's cores progress at `min(1, cores / running)`: processor sharing, kept
as one virtual clock on which every running op's end is fixed when it starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate, count, pairwise

from megatron_adaptra.errors import BadInput, ScheduleError
from megatron_adaptra.ir.check import SENDS
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.deps import GRADIENT, carried, remote_need
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Program
from megatron_adaptra.ir.schedule import Line
from megatron_adaptra.ir.timeline import Message, Span, Timeline

_COMPUTE, _SEND, _POST = range(3)
_MOVES = {Kind.SEND_F: _SEND, Kind.SEND_B: _SEND, Kind.POST_F: _POST, Kind.POST_B: _POST}
# What, op, seconds (of compute; of the word that a post sends), message it needs or moves (or -1).
Step = tuple[int, Op, float, int]


def simulate(program: Program, conditions: Conditions, sends: str = "eager") -> Timeline:
    """The predicted Timeline.

    `sends`: "eager" or "rendezvous". Raises BadInput for another word or another number of stages,
    and ScheduleError when the program cannot finish.
    """
    if sends not in SENDS:
        raise BadInput("sends", sends, f"it has to be one of {', '.join(SENDS)}")
    if conditions.stages != program.stages:
        raise BadInput("stages", conditions.stages, f"the program has {program.stages}")
    rendezvous = sends == "rendezvous"
    lines = [
        compile_line(line, stage, conditions, program.chunks, rendezvous)
        for stage, line in enumerate(program.order)
    ]
    spans: list[Span] = []
    messages: list[Message] = []
    end = Clock(lines, conditions, rendezvous, spans, messages).run()
    ends = list(accumulate(conditions.step_sync, initial=end + conditions.step_work))
    parts = [(Op(Kind.STEP, 0), end, ends[0])]
    parts += [(Op(Kind.SYNC, i), *pair) for i, pair in enumerate(pairwise(ends))]
    for op, start, stop in parts:
        if stop > start:
            spans += [Span(stage, op, start, stop) for stage in range(program.stages)]
    return Timeline(tuple(spans), tuple(messages), "predicted")


class Clock:
    """One run of compiled lines, one per stage; writes to `spans` and `messages` if given.

    `rendezvous`: whether a message waits for the word that its receive is posted.
    """

    def __init__(
        self,
        lines: Sequence[Sequence[Step]],
        conditions: Conditions,
        rendezvous: bool,
        spans: list[Span] | None = None,
        messages: list[Message] | None = None,
    ) -> None:
        self.lines, self.rendezvous = lines, rendezvous
        self.spans, self.messages = spans, messages
        stages = len(lines)
        self.at = [0] * stages
        cores = math.inf if conditions.cores is None else conditions.cores
        self.cores, self.shared = cores, cores < stages
        self.now = 0.0
        self.virtual = 0.0  # runs slower than `now` while more stages compute than there are cores
        self.running: list[tuple[float, int]] = []  # (virtual end, stage)
        self.started = [0.0] * stages
        # (arrival, serial number, message; or ~message for its word)
        self.flying: list[tuple[float, int, int]] = []
        self.serial = count()  # what arrives at one moment counts in the order of leaving
        self.arrived: set[int] = set()
        self.waiting: dict[int, int] = {}  # message -> the stage that cannot go on without it
        self.sent: dict[int, tuple[int, Op]] = {}  # rendezvous: sent, the word not yet there
        self.wanted: set[int] = set()  # rendezvous: the word is there
        self.free: dict[tuple[int, int], float] = {}  # link -> when its last message has left
        self.routes: dict[
            tuple[Kind, int], tuple[tuple[int, int], float, float]
        ] = {}  # (kind of send, stage) -> link, seconds on the wire, delay
        for stage in range(stages):
            for kind, target in ((Kind.SEND_F, stage + 1), (Kind.SEND_B, stage - 1)):
                way = stage, target % stages
                self.free[way] = 0.0
                self.routes[kind, stage] = way, conditions.wire(*way), conditions.link(*way).delay

    def run(self) -> float:
        """Seconds to the end of the last op. Raises ScheduleError where some never run."""
        running, flying, lines, at = self.running, self.flying, self.lines, self.at
        for stage in range(len(lines)):
            self.advance(stage)
        while running or flying:
            end, rate = math.inf, 1.0
            if running:
                end = running[0][0]
                if self.shared:
                    rate = min(1.0, self.cores / len(running))
                    end = self.now + (end - self.virtual) / rate
            if flying and flying[0][0] <= end:
                moment, _, message = heappop(flying)
                self.virtual = self.virtual + (moment - self.now) * rate if self.shared else moment
                self.now = moment
                if message < 0:
                    self.allow(~message)
                    continue
                self.arrived.add(message)
                stage = self.waiting.pop(message, -1)
                if stage >= 0:
                    self.advance(stage)
            else:
                self.virtual, stage = heappop(running)
                self.now = end
                if self.spans is not None:
                    op = lines[stage][at[stage]][1]
                    self.spans.append(Span(stage, op, self.started[stage], end))
                at[stage] += 1
                self.advance(stage)
        stuck = [s for s, i in enumerate(at) if i < len(lines[s])]
        if stuck:
            raise ScheduleError(f"stages {stuck} never finish; `check` says why")
        return self.now

    def advance(self, stage: int) -> None:
        """Run what `stage` can run now, up to the start of its next compute op."""
        steps, i = self.lines[stage], self.at[stage]
        while i < len(steps):
            what, op, seconds, message = steps[i]
            if what == _COMPUTE:
                if message >= 0 and message not in self.arrived:
                    self.waiting[message] = stage
                else:
                    self.started[stage] = self.now
                    heappush(self.running, (self.virtual + seconds, stage))
                break
            if what == _POST:
                heappush(self.flying, (self.now + seconds, next(self.serial), ~message))
            elif not self.rendezvous or message in self.wanted:
                self.depart(stage, op, message)
            else:
                self.sent[message] = stage, op
            i += 1
        self.at[stage] = i

    def allow(self, message: int) -> None:
        """The word that the receive of the message numbered `message` is posted is there."""
        self.wanted.add(message)
        if message in self.sent:
            self.depart(*self.sent.pop(message), message)

    def depart(self, source: int, op: Op, message: int) -> None:
        """Put `message`, sent by stage `source`, on its link.

        `self.now` is when its last condition was met.
        """
        link, wire, delay = self.routes[op.kind, source]
        begin = self.free[link]
        if self.now > begin:
            begin = self.now
        self.free[link] = left = begin + wire
        heappush(self.flying, (left + delay, next(self.serial), message))
        if self.messages is not None:
            self.messages.append(Message(source, link[1], op, self.now, left + delay))


def compile_line(
    line: Line, stage: int, conditions: Conditions, chunks: int, rendezvous: bool
) -> list[Step]:
    """The line of `stage` with costs looked up and messages numbered; `chunks` per stage.

    A post costs its stage nothing; without `rendezvous` it changes nothing either and is left out.
    """
    stages = conditions.stages
    width = 2 * stages * chunks  # messages of one microbatch: two leave every position
    seconds = {kind: conditions.seconds(kind, stage) / chunks for kind in Kind}
    seconds[Kind.POST_F] = conditions.link(stage, (stage - 1) % stages).delay
    seconds[Kind.POST_B] = conditions.link(stage, (stage + 1) % stages).delay
    steps: list[Step] = []
    for op in line:
        what = _MOVES.get(op.kind, _COMPUTE)
        if what == _POST and not rendezvous:
            continue
        if what == _COMPUTE:
            token = remote_need(op, stage, stages, chunks)
        else:
            token = carried(op, stage, stages)
        message = -1
        if token is not None:
            message = op.microbatch * width + 2 * token.position + (token.kind == GRADIENT)
        steps.append((what, op, seconds[op.kind], message))
    return steps
