"""A small pipeline on threads: linear layers, real autograd, messages over loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations_with_replacement
from typing import Any

import torch
from patience import PATIENCE

from megatron_adaptra.execute.executor import execute
from megatron_adaptra.execute.mailbox import Mailbox
from megatron_adaptra.execute.watchdog import Watchdog
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Neighbours, Program
from megatron_adaptra.ir.routes import Routes
from megatron_adaptra.ir.schedule import Schedule, warmup_line
from megatron_adaptra.measure.iteration_record import IterationRecord
from megatron_adaptra.measure.probe import Probe
from megatron_adaptra.transport.base import Transport

SHAPE = (3, 4)  # of one message


def depths(stages: int, count: int) -> list[tuple[int, ...]]:
    """All warmup depths that can run: they never increase towards the last stage."""
    return [d[::-1] for d in combinations_with_replacement(range(1, count + 1), stages)]


def schedule(warmup: Sequence[int], count: int) -> Schedule:
    return Schedule(tuple(warmup_line(d, count) for d in warmup), count)


def on_threads(count: int, body: Callable[[int], Any]) -> list[Any]:
    """`body(rank)` on `count` threads; what they returned, or what the first one raised."""
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(body, rank) for rank in range(count)]
        errors = [e for f in futures if (e := f.exception(2 * PATIENCE)) is not None]
        if errors:
            raise min(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError))
        return [f.result() for f in futures]


def layer(stage: int) -> torch.nn.Linear:
    made = torch.nn.Linear(SHAPE[1], SHAPE[1])
    draw = torch.Generator().manual_seed(stage)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return made


def batch(iteration: int, microbatch: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * iteration + microbatch)
    return torch.randn(SHAPE, generator=draw)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.tanh().square().sum()


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def reference(stages: int, count: int, iterations: int = 1) -> list[list[torch.Tensor]]:
    """Per stage the gradients of all microbatches in order, without a pipeline."""
    layers = [layer(stage) for stage in range(stages)]
    for iteration in range(iterations):
        for microbatch in range(count):
            x = batch(iteration, microbatch)
            for one in layers:
                x = one(x).relu()
            loss(x).backward()
    return [gradients(one) for one in layers]


class Stage:
    """One stage: its layer, its mailbox, and handlers for the ops of a line."""

    def __init__(self, stage: int, stages: int, transport: Transport, timeout: float = PATIENCE):
        self.stage, self.first, self.last = stage, stage == 0, stage == stages - 1
        self.layer = layer(stage)
        self.probe = Probe(stage)
        self.watchdog = Watchdog(stage, range(stages))
        self.mailbox = Mailbox(
            Neighbours(stage, Routes(stages)), transport, self.probe, self.watchdog, timeout
        )
        self.iteration = -1
        self.inputs: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, torch.Tensor] = {}

    def run(self, program: Program) -> IterationRecord:
        self.iteration += 1
        self.mailbox.begin(self.iteration, lambda: torch.empty(SHAPE))
        self.probe.begin(self.iteration)
        handlers = {
            Kind.F: self.forward,
            Kind.B: self.backward,
            Kind.POST_F: self.mailbox.post,
            Kind.POST_B: self.mailbox.post,
            Kind.SEND_F: self.send_forward,
            Kind.SEND_B: self.send_backward,
        }
        execute(program.order[self.stage], handlers)
        self.mailbox.finish()
        self.probe.pipeline_ends()
        self.probe.iteration_ends()
        return self.probe.record

    def forward(self, op: Op) -> None:
        x = batch(self.iteration, op.microbatch) if self.first else self.mailbox.take(op)
        self.probe.op_begins()
        self.inputs[op.microbatch] = x.requires_grad_()
        self.outputs[op.microbatch] = self.layer(x).relu()
        self.probe.op_ends(op)

    def backward(self, op: Op) -> None:
        gradient = None if self.last else self.mailbox.take(op)
        self.probe.op_begins()
        x, output = self.inputs.pop(op.microbatch), self.outputs.pop(op.microbatch)
        if self.last:
            loss(output).backward()
        else:
            output.backward(gradient)
        assert x.grad is not None
        self.gradients[op.microbatch] = x.grad
        self.probe.op_ends(op)

    def send_forward(self, op: Op) -> None:
        self.mailbox.send(op, self.outputs[op.microbatch])

    def send_backward(self, op: Op) -> None:
        gradient = self.gradients.pop(op.microbatch)
        self.mailbox.send(op, gradient)
        gradient.fill_(float("nan"))  # the mailbox has its copy
