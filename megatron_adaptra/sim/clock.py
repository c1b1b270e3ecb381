"""The discrete-event clock: how long a program takes under given conditions.

A worker is a stage; of several replicas, one stage of one of them.

Links: a message may leave when it is sent (*eager*), or once it is sent and the word that its
receive is posted has come over the reverse link (*rendezvous*, as gloo does it). Messages of one
directed link go one after another at its bandwidth; each arrives `delay` seconds after its last
byte left. Where a worker's port is limited, what it sends and what it receives wait for that, too.

Workers that share a machine's cores progress at `min(1, cores / running)`: processor sharing, kept
as one virtual clock on which every running op's end is fixed when it starts. An op that needs its
core for a share of its seconds waits for the others before it computes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from itertools import accumulate, count, pairwise

from megatron_adaptra.base.errors import BadInput, ScheduleError
from megatron_adaptra.ir.check import SENDS
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.deps import GRADIENT, carried, maker, remote_need, user
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Program
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import Routes
from megatron_adaptra.ir.schedule import Line
from megatron_adaptra.ir.timeline import Message, Span, Timeline

_COMPUTE, _SEND, _POST = range(3)
_MOVES = {Kind.SEND_F: _SEND, Kind.SEND_B: _SEND, Kind.POST_F: _POST, Kind.POST_B: _POST}
# Action, op, seconds (of compute, or of the word that a post sends), the message that it needs or
# moves (or -1), the target of a send (or -1).
Step = tuple[int, Op, float, int, int]
_WAITED = 1 << 60  # plus a worker, in place of a message: its wait before computing ends
Costs = Conditions | ReplicaConditions  # of one pipeline, or of several replicas
_LinkCosts = tuple[float, float, tuple[Hashable, ...]]


def simulate(program: Program, costs: Costs, sends: str = "eager") -> Timeline:
    """Return the predicted Timeline.

    Args:
        program: of one replica or of several.
        costs: `Conditions` for one, `ReplicaConditions` for several.
        sends: "eager" or "rendezvous".

    Raises:
        BadInput: `sends` is another word, or `costs` are of another number of workers.
        ScheduleError: the program cannot finish.
    """
    if sends not in SENDS:
        raise BadInput("sends", sends, f"it has to be one of {', '.join(SENDS)}")
    workers = len(program.order)
    if costs.workers != workers:
        what = "stages" if program.replicas == 1 else "workers"
        raise BadInput(what, costs.workers, f"the program has {workers}")
    rendezvous = sends == "rendezvous"
    lines = [
        compile_line(line, worker, costs, program.routes, rendezvous)
        for worker, line in enumerate(program.order)
    ]
    spans: list[Span] = []
    messages: list[Message] = []
    end = Clock(lines, costs, rendezvous, spans, messages).run()
    spans += step_spans(costs, end)
    return Timeline(tuple(spans), tuple(messages), "predicted", program.replicas, program.stages)


def step_spans(costs: Costs, end: float) -> list[Span]:
    """The optimizer step on all workers, from `end` on: seconds from the iteration's start."""
    ends = list(accumulate(costs.step_sync, initial=end + costs.step_work))
    parts = [(Op(Kind.STEP, 0), end, ends[0])]
    parts += [(Op(Kind.SYNC, i), *pair) for i, pair in enumerate(pairwise(ends))]
    workers = range(costs.workers)
    return [Span(w, op, start, stop) for op, start, stop in parts if stop > start for w in workers]


class Clock:
    """One run of compiled lines, one per worker; writes to `spans` and `messages` if given.

    `rendezvous`: whether a message waits for the word that its receive is posted.
    """

    def __init__(
        self,
        lines: Sequence[Sequence[Step]],
        costs: Costs,
        rendezvous: bool,
        spans: list[Span] | None = None,
        messages: list[Message] | None = None,
    ) -> None:
        self.lines, self.rendezvous = lines, rendezvous
        self.spans, self.messages = spans, messages
        self.costs = costs
        self.at = [0] * len(lines)
        cores = math.inf if costs.cores is None else costs.cores
        self.cores, self.shared = cores, cores < len(lines)
        self.now = 0.0
        self.virtual = 0.0  # runs slower than `now` while more workers compute than there are cores
        self.running: list[tuple[float, int]] = []  # (virtual end, worker)
        self.computes = [costs.on_core(w) if self.shared else 1.0 for w in range(len(lines))]
        self.started = [0.0] * len(lines)
        # (arrival, serial number, message; or ~message for its word)
        self.flying: list[tuple[float, int, int]] = []
        self.serial = count()  # what arrives at one moment counts in the order of leaving
        self.arrived: set[int] = set()
        self.waiting: dict[int, int] = {}  # message -> the worker that cannot go on without it
        self.sent: dict[int, tuple[int, Op, int]] = {}  # rendezvous: sent, the word not yet there
        self.wanted: set[int] = set()  # rendezvous: the word is there
        self.links: dict[tuple[int, int], _LinkCosts] = {}
        self.free: dict[Hashable, float] = {}  # by link or port: when its last message has left

    def run(self) -> float:
        """Seconds to the end of the last op. Raises ScheduleError where some never run."""
        running, flying, lines, at = self.running, self.flying, self.lines, self.at
        for worker in range(len(lines)):
            self.advance(worker)
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
                if message >= _WAITED:
                    self.compute(message - _WAITED)
                    continue
                self.arrived.add(message)
                worker = self.waiting.pop(message, -1)
                if worker >= 0:
                    self.advance(worker)
            else:
                self.virtual, worker = heappop(running)
                self.now = end
                if self.spans is not None:
                    op = lines[worker][at[worker]][1]
                    self.spans.append(Span(worker, op, self.started[worker], end))
                at[worker] += 1
                self.advance(worker)
        stuck = [s for s, i in enumerate(at) if i < len(lines[s])]
        if stuck:
            raise ScheduleError(f"workers {stuck} never finish; `check` says why")
        return self.now

    def advance(self, worker: int) -> None:
        """Run what `worker` can run now, up to the start of its next compute op."""
        steps, i = self.lines[worker], self.at[worker]
        while i < len(steps):
            what, op, seconds, message, target = steps[i]
            if what == _COMPUTE:
                if message >= 0 and message not in self.arrived:
                    self.waiting[message] = worker
                else:
                    self.started[worker] = self.now
                    waits = seconds * (1 - self.computes[worker])
                    if waits > 0:
                        ends = self.now + waits, next(self.serial), _WAITED + worker
                        heappush(self.flying, ends)
                    else:
                        heappush(self.running, (self.virtual + seconds, worker))
                break
            if what == _POST:
                heappush(self.flying, (self.now + seconds, next(self.serial), ~message))
            elif not self.rendezvous or message in self.wanted:
                self.depart(worker, op, target, message)
            else:
                self.sent[message] = worker, op, target
            i += 1
        self.at[worker] = i

    def compute(self, worker: int) -> None:
        """Start the op of `worker` on a core: its wait before computing is over."""
        seconds = self.lines[worker][self.at[worker]][2] * self.computes[worker]
        heappush(self.running, (self.virtual + seconds, worker))

    def allow(self, message: int) -> None:
        """Let message number `message` leave once it is sent: its receive is known to be posted."""
        self.wanted.add(message)
        if message in self.sent:
            self.depart(*self.sent.pop(message), message)

    def depart(self, source: int, op: Op, target: int, message: int) -> None:
        """Put `message`, sent by worker `source` to `target`, on its link.

        `self.now` is when its last condition was met.
        """
        link = source, target
        one = self.links.get(link)
        if one is None:
            one = self.links[link] = _link_costs(self.costs, source, target)
        wire, delay, narrow = one
        begin = self.free.get(link, 0.0)
        if self.now > begin:
            begin = self.now
        for port in narrow:
            if self.free.get(port, 0.0) > begin:
                begin = self.free[port]
        self.free[link] = left = begin + wire
        for port in narrow:
            self.free[port] = left
        heappush(self.flying, (left + delay, next(self.serial), message))
        if self.messages is not None:
            self.messages.append(Message(source, target, op, self.now, left + delay))


def _link_costs(costs: Costs, source: int, target: int) -> _LinkCosts:
    """Return a message's seconds on the wire, its delay, and the ports that it occupies."""
    ways = ((source, "out"), costs.port(source)), ((target, "in"), costs.port(target))
    narrow = tuple((port, seconds) for port, seconds in ways if seconds > 0)
    wire = max([costs.wire(source, target), *(seconds for _, seconds in narrow)])
    return wire, costs.link(source, target).delay, tuple(port for port, _ in narrow)


def compile_line(
    line: Line, worker: int, costs: Costs, routes: Routes, rendezvous: bool
) -> list[Step]:
    """The line of `worker` with costs looked up and messages numbered.

    A post costs its stage nothing; without `rendezvous` it changes nothing either and is left out.
    """
    width = 2 * routes.positions  # messages of one microbatch: two leave every position
    microbatches = costs.microbatches
    each = {kind: costs.seconds(kind, worker) / routes.chunks for kind in Kind}
    steps: list[Step] = []
    for op in line:
        what = _MOVES.get(op.kind, _COMPUTE)
        if what == _POST and not rendezvous:
            continue
        find = remote_need if what == _COMPUTE else carried
        token = find(op, worker, routes)
        message, target, seconds = -1, -1, each[op.kind]
        if token is not None:
            unit = op.microbatch if op.home is None else op.home * microbatches + op.microbatch
            message = unit * width + 2 * token.position + (token.kind == GRADIENT)
            if what == _SEND:
                to = user(token, routes)
                assert to is not None  # `check` refuses a send to nobody
                target = to
            elif what == _POST:
                seconds = costs.link(worker, maker(token, routes)).delay
        steps.append((what, op, seconds, message, target))
    return steps
