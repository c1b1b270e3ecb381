"""The discrete-event clock: how long a program takes under given conditions.

Links: a message leaves when it is sent (*eager*) or when it is sent and the word that its receive
is posted has travelled back (*rendezvous*, as gloo does it); messages of one directed link go one
after another at the link's bandwidth; each arrives `delay` seconds after its last byte left.

Stages that share a machine's cores progress at `min(1, cores / running)`: processor sharing, kept
as one virtual clock on which every running op's end is fixed when it starts.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from megatron_adaptra.errors import BadInput, ScheduleError
from megatron_adaptra.ir.check import SENDS
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.deps import GRADIENT, remote_need
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Program
from megatron_adaptra.ir.timeline import Message, Span, Timeline

_COMPUTE, _SEND, _POST = range(3)
_MOVES = {Kind.SEND_F: _SEND, Kind.SEND_B: _SEND, Kind.POST_F: _POST, Kind.POST_B: _POST}
_Step = tuple[int, Op, float, int]  # what, op, seconds, key of the message it needs or moves (-1)


def simulate(program: Program, conditions: Conditions, sends: str = "eager") -> Timeline:
    """The predicted Timeline; raises ScheduleError when the program cannot finish."""
    if sends not in SENDS:
        raise BadInput("sends", sends, f"one of {', '.join(SENDS)}")
    if conditions.stages != program.stages:
        raise BadInput("stages", conditions.stages, f"the program has {program.stages}")
    return _Clock(program, conditions, rendezvous=sends == "rendezvous").run()


class _Clock:
    def __init__(self, program: Program, conditions: Conditions, rendezvous: bool) -> None:
        self.program, self.conditions, self.rendezvous = program, conditions, rendezvous
        self.steps = [_compile(program, stage, conditions) for stage in range(program.stages)]
        self.at = [0] * program.stages
        cores = math.inf if conditions.cores is None else conditions.cores
        self.cores, self.shared = cores, cores < program.stages
        self.now = 0.0
        self.virtual = 0.0  # runs slower than `now` while more stages compute than there are cores
        self.running: list[tuple[float, int]] = []  # (virtual end, stage)
        self.started = [0.0] * program.stages
        self.flying: list[tuple[float, int]] = []  # (arrival, message)
        self.arrived: set[int] = set()
        self.waiting: dict[int, int] = {}  # message -> the stage that cannot go on without it
        self.free: dict[tuple[int, int], float] = {}  # link -> when its last message has left
        self.sent: dict[int, tuple[int, Op]] = {}  # rendezvous: sent, its receive not yet posted
        self.posted: dict[int, float] = {}  # rendezvous: when the receive was posted
        self.spans: list[Span] = []
        self.messages: list[Message] = []

    def run(self) -> Timeline:
        running, flying = self.running, self.flying
        for stage in range(self.program.stages):
            self.advance(stage)
        while running or flying:
            rate = min(1.0, self.cores / len(running)) if running else 1.0
            end = self.next_end(rate)
            if flying and flying[0][0] <= end:
                moment, message = heappop(flying)
                self.virtual = self.virtual + (moment - self.now) * rate if self.shared else moment
                self.now = moment
                self.arrived.add(message)
                stage = self.waiting.pop(message, -1)
                if stage >= 0:
                    self.advance(stage)
            else:
                self.virtual, stage = heappop(running)
                self.now = end
                op = self.steps[stage][self.at[stage]][1]
                self.spans.append(Span(stage, op, self.started[stage], end))
                self.at[stage] += 1
                self.advance(stage)
        stuck = [s for s, i in enumerate(self.at) if i < len(self.steps[s])]
        if stuck:
            raise ScheduleError(f"stages {stuck} never finish; `check` says why")
        if self.conditions.tail:
            end = self.now + self.conditions.tail
            self.spans += [
                Span(stage, Op(Kind.TAIL, 0), self.now, end) for stage in range(len(self.at))
            ]
        return Timeline(tuple(self.spans), tuple(self.messages), "predicted")

    def next_end(self, rate: float) -> float:
        if not self.running:
            return math.inf
        virtual_end = self.running[0][0]
        return self.now + (virtual_end - self.virtual) / rate if self.shared else virtual_end

    def advance(self, stage: int) -> None:
        """Run what `stage` can run now, up to the start of its next compute op."""
        steps = self.steps[stage]
        while self.at[stage] < len(steps):
            what, op, seconds, message = steps[self.at[stage]]
            if what == _COMPUTE:
                if message >= 0 and message not in self.arrived:
                    self.waiting[message] = stage
                else:
                    self.started[stage] = self.now
                    heappush(self.running, (self.virtual + seconds, stage))
                return
            if what == _POST:
                self.post(message)
            elif not self.rendezvous or message in self.posted:
                self.depart(stage, op, message)
            else:
                self.sent[message] = stage, op
            self.at[stage] += 1

    def post(self, message: int) -> None:
        if self.rendezvous:
            self.posted[message] = self.now
            if message in self.sent:
                self.depart(*self.sent.pop(message), message)

    def depart(self, source: int, op: Op, message: int) -> None:
        """Put a sent message on its link; `self.now` is when its last condition was met."""
        stages = self.program.stages
        target = (source + (1 if op.kind is Kind.SEND_F else -1)) % stages
        link = self.conditions.link(source, target)
        begin = max(self.now, self.free.get((source, target), 0.0))
        if self.rendezvous:
            word = self.conditions.link(target, source).delay  # that the receive is posted
            begin = max(begin, self.posted[message] + word)
        left = begin + self.conditions.message_bytes / link.bandwidth
        self.free[source, target] = left
        heappush(self.flying, (left + link.delay, message))
        self.messages.append(Message(source, target, op, self.now, left + link.delay))


def _compile(program: Program, stage: int, conditions: Conditions) -> list[_Step]:
    """The line of one stage with costs looked up and messages numbered."""
    stages, chunks, count = program.stages, program.chunks, program.microbatches
    seconds = {kind: conditions.seconds(kind, stage) / chunks for kind in Kind}
    steps: list[_Step] = []
    for op in program.order[stage]:
        here = op.chunk * stages + stage
        what = _MOVES.get(op.kind, _COMPUTE)
        if what == _COMPUTE:
            token = remote_need(op, stage, stages, chunks)
            message = -1
            if token is not None:
                message = (2 * token.position + (token.kind == GRADIENT)) * count + op.microbatch
        elif what == _SEND:
            message = (2 * here + (op.kind is Kind.SEND_B)) * count + op.microbatch
        else:
            back = op.kind is Kind.POST_B
            message = (2 * (here + 1 if back else here - 1) + back) * count + op.microbatch
        steps.append((what, op, seconds[op.kind], message))
    return steps
