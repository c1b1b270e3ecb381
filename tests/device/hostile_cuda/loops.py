"""The two ways in which a stage runs an iteration, over the product's mailbox and transport."""

from __future__ import annotations

import threading
from operator import methodcaller
from types import SimpleNamespace
from typing import Any

import torch
from fakes.hostile_cuda.driver import Driver
from hostile_cuda.collectives import Collectives
from hostile_cuda.stage_model import Position, label

from megatron_adaptra.device.base import Device, Mark
from megatron_adaptra.execute.executor import execute
from megatron_adaptra.execute.mailbox import Mailbox
from megatron_adaptra.ir.deps import position_of
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Program
from megatron_adaptra.ir.routes import Routes


class ExecutorStage:
    """Runs a line op by op, as adapter/pipeline/executor_stage.py does with Megatron's ops."""

    def __init__(
        self,
        driver: Driver,
        device: Device,
        mailbox: Mailbox,
        chunks: int,
        words: int,
        collectives: Collectives,
    ) -> None:
        self.driver, self.mailbox, self.chunks, self.words = driver, mailbox, chunks, words
        self.device = device
        self.marks: list[tuple[str, Mark]] = []  # behind kernels
        self.stage, self.stages = mailbox.neighbours.stage, mailbox.neighbours.stages
        last = self.stages * chunks - 1
        ats = [chunk * self.stages + self.stage for chunk in range(chunks)]
        self.collectives = collectives
        self.positions = [Position(driver, at, at == last, words, collectives) for at in ats]
        self.iteration = 0
        self._out: dict[tuple[Kind, int, int], torch.Tensor] = {}  # to be sent

    def new_message(self) -> torch.Tensor:
        return self.driver.tensor(self.words, "a received message")

    def run(self, program: Program) -> None:
        mailbox = self.mailbox
        handlers = {
            Kind.F: self.forward,
            Kind.B: self.backward,
            Kind.I: self.backward_input,
            Kind.W: self.backward_weight,
            Kind.POST_F: mailbox.post,
            Kind.POST_B: mailbox.post,
            Kind.SEND_F: self.send,
            Kind.SEND_B: self.send,
        }
        execute(program.order[self.stage], handlers)
        self.end()

    def mark(self, kind: str, microbatch: int, position: Position) -> None:
        """The moment when what was launched is over."""
        name = label(kind, self.iteration, microbatch, position.at)
        self.marks.append((name, self.device.mark()))
        self.marks[-1][1].at()  # mostly too early

    def end(self) -> None:
        self.device.anchor()
        self.collectives.step(self.iteration)
        for position in self.positions:
            position.step(self.iteration)
        self.iteration += 1

    def forward(self, op: Op) -> None:
        position = self.positions[op.chunk]
        first = position_of(op, self.stage, Routes(self.stages)) == 0
        received = position.batch(self.iteration, op.microbatch) if first else self.mailbox.take(op)
        self.mailbox.probe.op_begins()
        output = position.forward(self.iteration, op.microbatch, received)
        self.mark("F", op.microbatch, position)
        if not position.last:
            self._out[Kind.SEND_F, op.microbatch, op.chunk] = output
        self.mailbox.probe.op_ends(op)

    def backward(self, op: Op) -> None:
        self.backward_input(op)
        self.positions[op.chunk].backward_weight(self.iteration, op.microbatch)
        self.mailbox.probe.op_ends(op)

    def backward_input(self, op: Op) -> None:
        position = self.positions[op.chunk]
        gradient = None if position.last else self.mailbox.take(op)
        self.mailbox.probe.op_begins()
        made = position.backward_input(self.iteration, op.microbatch, gradient)
        self.mark("I", op.microbatch, position)
        if op.kind is Kind.I:
            self.mailbox.probe.op_ends(op)
        if position.at:
            self._out[Kind.SEND_B, op.microbatch, op.chunk] = made

    def backward_weight(self, op: Op) -> None:
        self.mailbox.probe.op_begins()
        self.positions[op.chunk].backward_weight(self.iteration, op.microbatch)
        self.mailbox.probe.op_ends(op)

    def send(self, op: Op) -> None:
        """Send and let go: the next op may be given the memory."""
        self.mailbox.send(op, self._out.pop((op.kind, op.microbatch, op.chunk)))


_running = threading.local()  # the stage that this thread runs


class NativeStage(ExecutorStage):
    """Megatron's own schedule over our communicators, with forward and backward steps of ours."""

    def run(self, program: Program) -> None:
        from megatron.core.pipeline_parallel import schedules, utils
        from megatron.core.process_groups_config import ProcessGroupCollection

        from megatron_adaptra.adapter.compat.profiles import profile
        from megatron_adaptra.adapter.pipeline.native import AdaptraCommunicator
        from megatron_adaptra.adapter.pipeline.native_chunks import ChunkCommunicator, overlapping

        # This process runs nothing else of Megatron's.
        schedules.forward_step, schedules.backward_step = _forward_step, _backward_step
        torch.distributed.get_global_rank = lambda _, rank: rank
        for module in (schedules, utils):
            for name, asks in (("get_pg_rank", "rank"), ("get_pg_size", "size")):
                if hasattr(module, name):  # they ask groups only where torch has its own
                    setattr(module, name, methodcaller(asks))
        _running.stage = self
        config, line = self._config(), program.order[self.stage]
        groups = ProcessGroupCollection()
        groups.pp, groups.embd, groups.pos_embd = _Group(self.stage, self.stages), None, None
        groups.tp = groups.cp = groups.dp_cp = _Group(0, 1)
        model = [torch.nn.Linear(1, 1) for _ in range(self.chunks)]
        for module in model:
            module.config, module.model_type = config, None  # type: ignore[assignment]
        arguments: dict[str, Any] = {
            "forward_step_func": None,
            "data_iterator": [None] * self.chunks,
            "model": model,
            "num_microbatches": program.microbatches,
            "seq_length": 1,
            "micro_batch_size": 1,
        }
        arguments[profile().groups] = groups
        if self.chunks == 1:
            own = AdaptraCommunicator(groups.pp, config, profile(), line, self.mailbox)
            schedules.forward_backward_pipelining_without_interleaving(
                p2p_communicator=own, **arguments
            )
        else:
            chunked = ChunkCommunicator(groups.pp, config, self.chunks, line, self.mailbox)
            with overlapping(config):
                schedules.forward_backward_pipelining_with_interleaving(
                    p2p_communicator=chunked, **arguments
                )
            chunked.finish()
        self.end()

    def _config(self) -> Any:
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(
            num_layers=self.stages * self.chunks,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=self.stages,
            virtual_pipeline_model_parallel_size=self.chunks if self.chunks > 1 else None,
            pipeline_dtype=torch.float32,
        )
        config.deallocate_pipeline_outputs = True  # what was sent is emptied at once
        return config

    def forward_step(self, received: Any, microbatch: int, chunk: int) -> Any:
        several = isinstance(received, list)
        x = received[0] if several else received
        position = self.positions[chunk]
        if x is None:
            x = position.batch(self.iteration, microbatch)
        output = position.forward(self.iteration, microbatch, x)
        self.mark("F", microbatch, position)
        output.op = SimpleNamespace(microbatch=microbatch, chunk=chunk)  # type: ignore
        tokens = torch.zeros([], dtype=torch.int)
        return (output if self.chunks > 1 else [output]), tokens

    def backward_step(self, outputs: Any, gradients: Any) -> Any:
        output = outputs[0] if isinstance(outputs, list) else outputs
        gradient = gradients[0] if isinstance(gradients, list) else gradients
        op, position = output.op, self.positions[output.op.chunk]
        made = position.backward_input(self.iteration, op.microbatch, gradient)
        self.mark("I", op.microbatch, position)
        position.backward_weight(self.iteration, op.microbatch)
        return made if self.chunks > 1 else [made]


def _forward_step(*_: Any, **given: Any) -> Any:
    received = given["input_tensor"] if "input_tensor" in given else _[4]
    stage: NativeStage = _running.stage
    return stage.forward_step(received, given["current_microbatch"], given.get("vp_stage") or 0)


def _backward_step(_: Any, outputs: Any, gradients: Any, *__: Any, **___: Any) -> Any:
    stage: NativeStage = _running.stage
    return stage.backward_step(outputs, gradients)


class _Group:
    """What schedules ask of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size
