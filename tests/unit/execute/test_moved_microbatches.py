"""Any routes give the gradients of no pipeline at all, in double precision, over real mailboxes.

Replicas hold the same layers; after an iteration their gradients are added up, as the data-parallel
reduction does. Only the order of the sums differs.
"""

from __future__ import annotations

import random

import pytest
import torch
from agree.pipeline import PATIENCE, SHAPE, layer, loss, on_threads
from ir.strategies import random_schedule
from seeding import new_seed
from transport.loopback import LoopbackNetwork

from megatron_adaptra.execute.executor import execute
from megatron_adaptra.execute.mailbox import Mailbox
from megatron_adaptra.execute.watchdog import Watchdog
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Neighbours, Program, lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.probe import Probe
from megatron_adaptra.transport.base import Transport

STAGES, REPLICAS, COUNT = 3, 2, 5
Gradients = list[torch.Tensor]


def batch(home: int, microbatch: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * home + microbatch)
    return torch.randn(SHAPE, generator=draw, dtype=torch.float64)


def reference() -> list[Gradients]:
    """Per stage the gradients of all microbatches of all homes."""
    layers = [layer(stage).double() for stage in range(STAGES)]
    for home in range(REPLICAS):
        for microbatch in range(COUNT):
            x = batch(home, microbatch)
            for one in layers:
                x = one(x).relu()
            (loss(x) / COUNT).backward()
    return [[p.grad for p in one.parameters() if p.grad is not None] for one in layers]


class Worker:
    """One stage of one replica."""

    def __init__(self, worker: int, program: Program, transport: Transport) -> None:
        self.stage, self.line = worker % STAGES, program.order[worker]
        self.layer, self.probe = layer(self.stage).double(), Probe(worker)
        watchdog = Watchdog(worker, range(STAGES * REPLICAS), replicas=REPLICAS)
        neighbours = Neighbours(worker, program.routes)
        self.mailbox = Mailbox(neighbours, transport, self.probe, watchdog, PATIENCE)
        self.held: dict[tuple[int, int | None], tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self) -> Gradients:
        self.mailbox.begin(0, lambda: torch.empty(SHAPE, dtype=torch.float64))
        self.probe.begin(0)
        execute(
            self.line,
            {
                Kind.F: self.forward, Kind.B: self.backward,
                Kind.POST_F: self.mailbox.post, Kind.POST_B: self.mailbox.post,
                Kind.SEND_F: lambda op: self.mailbox.send(op, self.held[self.key(op)][1]),
                Kind.SEND_B: lambda op: self.mailbox.send(op, self.held.pop(self.key(op))[0].grad),
            },
        )  # fmt: skip
        self.mailbox.finish()
        self.mailbox.close()
        zero = torch.zeros
        return [
            zero(p.shape, dtype=p.dtype) if p.grad is None else p.grad
            for p in self.layer.parameters()
        ]

    @staticmethod
    def key(op: Op) -> tuple[int, int | None]:
        return op.microbatch, op.home

    def forward(self, op: Op) -> None:
        assert op.home is not None
        x = self.mailbox.take(op) if self.stage else batch(op.home, op.microbatch)
        x.requires_grad_()
        self.held[self.key(op)] = x, self.layer(x).relu()

    def backward(self, op: Op) -> None:
        output = self.held[self.key(op)][1]
        if self.stage == STAGES - 1:
            (loss(output) / COUNT).backward()  # by what its home has, whatever this worker runs
        else:
            output.backward(self.mailbox.take(op))
        if not self.stage:
            del self.held[self.key(op)]


def trained(schedule: Schedule) -> list[Gradients]:
    """Per stage the sum of its workers' gradients after an iteration."""
    program = lower(schedule)
    check(program)
    network = LoopbackNetwork()

    def body(worker: int) -> Gradients:
        transport = network.open(worker)
        found = Worker(worker, program, transport).run()
        transport.close()
        return found

    found = on_threads(STAGES * REPLICAS, body)
    network.close()
    return [
        [sum(each[1:], each[0]) for each in zip(*found[stage::STAGES], strict=True)]
        for stage in range(STAGES)
    ]


@pytest.mark.parametrize("moved", [0.0, 0.2, 0.5, 1.0])
def test_sums_of_gradients_are_those_of_no_pipeline(moved: float) -> None:
    rng, wanted = random.Random(new_seed()), reference()
    for _ in range(10):
        schedule = random_schedule(
            rng, STAGES, COUNT, replicas=REPLICAS, split=0.0, again=0.0, moved=moved
        )
        for got, exact in zip(trained(schedule), wanted, strict=True):
            for mine, theirs in zip(got, exact, strict=True):
                assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-13)


def test_a_weight_of_fewer_microbatches_is_noticed() -> None:
    """The comparison would see a loss that is divided by what one worker has run."""
    wanted = reference()
    assert not torch.allclose(wanted[0][0] * COUNT / (COUNT - 1), wanted[0][0], rtol=1e-12)
