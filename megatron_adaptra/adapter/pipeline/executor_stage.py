"""The executor seam: a stage whose ops run through Megatron's forward_step and backward_step.

All that surrounds the ops of an iteration (gradient synchronisation, deallocation of sent outputs,
finalisation of gradients) follows Megatron's schedules, so that losses and parameters are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from torch.autograd.graph import GradientEdge

from megatron_adaptra.adapter.compat.profiles import call
from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs, config_of, models_of
from megatron_adaptra.adapter.pipeline.byte_counts import GuardedMeter
from megatron_adaptra.adapter.pipeline.grad_sync import GradSync
from megatron_adaptra.adapter.pipeline.home_data import IterationData
from megatron_adaptra.adapter.pipeline.home_random import HomeRandom
from megatron_adaptra.adapter.pipeline.memory import Key
from megatron_adaptra.adapter.pipeline.recompute import Replay, buffers_of
from megatron_adaptra.adapter.pipeline.split import SplitBackward, WeightGradStore
from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.execute.executor import execute
from megatron_adaptra.execute.mailbox import Mailbox
from megatron_adaptra.ir.deps import position_of
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Line


@dataclass
class _Held:
    """A _Held keeps one microbatch of one chunk, from its forward to its backward."""

    received: torch.Tensor | None
    output: torch.Tensor
    embedded: list[GradientEdge] = field(default_factory=list)
    replay: Replay | None = None  # of one that keeps no activations, until it is recomputed


def key_of(op: Op) -> Key:
    """Return the microbatch, the chunk and the home of an op."""
    return op[1:]


class MegatronStage:
    """A stage runs one training iteration of the worker that `mailbox` belongs to.

    `line`: its ops. `groups`: Megatron's process groups. `guard`: bytes of activations are measured
    through it. `splits`: one per chunk, where the line has halves of backwards. `count_bytes`:
    whether to measure bytes of activations, which takes time on a CPU. `drawn`: random states of
    forwards, where these go by home, not op after op; its iteration has begun.
    """

    def __init__(
        self,
        line: Line,
        mailbox: Mailbox,
        arguments: ScheduleArgs,
        groups: Any,
        guard: Guard,
        splits: Sequence[SplitBackward] = (),
        count_bytes: bool = False,
        drawn: HomeRandom | None = None,
    ) -> None:
        data = arguments["data_iterator"]
        self.models, self.config = models_of(arguments), config_of(arguments)
        self.data: list[Any] = data if isinstance(data, list) else [data]
        self.line, self.mailbox, self.arguments, self.groups = line, mailbox, arguments, groups
        self.stage, self.routes = mailbox.neighbours.stage, mailbox.neighbours.routes
        self.losses: list[Any] = []
        self.tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
        # Each chunk's first forward, which Megatron marks: layers cache their weights' casts.
        self._first = {op.chunk: op for op in reversed(line) if op.kind is Kind.F}
        self.recomputed = {key_of(op) for op in line if op.kind is Kind.R}
        self.sync = GradSync(self.config, self.models, line, self.stage)
        self.splits, self.drawn = splits, drawn
        ignored = (t for m in self.models for t in (*m.parameters(), *buffers_of(m)))
        self.meter = GuardedMeter(guard, len(self.models), count_bytes, ignored)
        self._held: dict[Key, _Held] = {}
        self._stores: dict[Key, WeightGradStore] = {}  # between the two halves of a backward
        self._gradients: dict[Key, torch.Tensor | None] = {}  # of inputs, until they are sent

    def run(self) -> list[Any]:
        """Run the line; return what the last stage's loss function gave, per microbatch."""
        config, last_stage = self.config, self.stage == self.routes.stages - 1
        finalize = config.finalize_model_grads_func
        # Megatron hands over a list exactly where there are several chunks.
        model = self.models if len(self.models) > 1 else self.models[0]
        embedding = None
        if finalize is not None:
            embedding = schedules.clear_embedding_activation_buffer(config, model, last_stage)
        self.sync.begin()
        with contextlib.ExitStack() as stack:
            for split in self.splits:
                stack.enter_context(split.recording())
            execute(
                self.line,
                {
                    Kind.F: self.forward,
                    Kind.B: self.backward,
                    Kind.I: self.backward_input,
                    Kind.W: self.backward_weight,
                    Kind.R: self.recompute,
                    Kind.POST_F: self.mailbox.post,
                    Kind.POST_B: self.mailbox.post,
                    Kind.SEND_F: self.send_forward,
                    Kind.SEND_B: self.send_backward,
                },
            )
        self.mailbox.probe.holds(self.meter.end())
        self.sync.end()
        if finalize is not None:
            schedules.finish_embedding_wgrad_compute(config, embedding, last_stage, self.groups.tp)
            call(
                finalize,
                model=self.models,
                num_tokens=self.tokens if config.calculate_per_token_loss else None,
                pg_collection=self.groups,
                grad_finalize_pgs=self.groups,
                force_all_reduce=self.arguments.get("force_all_reduce", False),
            )
        return self.losses

    def forward(self, op: Op) -> None:
        """Run F3, Megatron's forward step; one that will be recomputed keeps its input alone."""
        self.sync.before_forward()
        received = None if self._is_first(op) else self.mailbox.take(op)
        if received is not None:
            received.requires_grad_()
        key, data = key_of(op), self.data[op.chunk]
        if isinstance(data, IterationData):
            data.at(op)
        recomputed = key in self.recomputed
        self.meter.begins()
        self.mailbox.probe.op_begins()
        with self._drawing(op):
            if recomputed:
                replay = Replay()
                with replay.discard(self.models[op.chunk]):
                    output, tokens = self._step(op, received, replay.recording(data), self.losses)
                self._held[key] = _Held(received, output.detach(), replay=replay)
            else:
                output, tokens = self._step(op, received, data, self.losses)
                self._held[key] = _Held(received, output, self._embedded(op))
        self.mailbox.probe.op_ends(op)
        self.tokens += tokens
        if recomputed:
            self.meter.hold_recomputed(key, received)
        else:
            self.meter.hold_whole(key, output, received)
        if self._is_last(op):
            self._deallocate(output)

    def recompute(self, op: Op) -> None:
        """Run R3, the same forward again, now with its activations."""
        held = self._held[key_of(op)]
        replay, held.replay = held.replay, None
        assert replay is not None
        self.meter.begins()
        self.mailbox.probe.op_begins()
        with replay.recompute(self.models[op.chunk]):
            data = replay.replaying(self.data[op.chunk])
            held.output, _ = self._step(op, held.received, data, [])
        held.embedded = self._embedded(op)
        self.mailbox.probe.op_ends(op)
        self.meter.hold_whole(key_of(op), held.output, held.received)
        self._deallocate(held.output)

    def send_forward(self, op: Op) -> None:
        """Run SF3: send the output and free it."""
        held = self._held[key_of(op)]
        self.mailbox.send(op, held.output)
        self._deallocate(held.output)  # the mailbox has its copy

    def backward(self, op: Op) -> None:
        """Run B3, Megatron's backward step."""
        gradient = None if self._is_last(op) else self.mailbox.take(op)
        held = self._held.pop(key_of(op))
        weights = op if op.kind is Kind.B else op._replace(kind=Kind.W)
        self.sync.before_weights(weights)
        self.mailbox.probe.op_begins()
        self._gradients[key_of(op)] = call(
            schedules.backward_step,
            input_tensor=held.received,
            output_tensor=held.output,
            output_tensor_grad=gradient,
            model_type=schedules.get_model_type(self.models[op.chunk])
            if hasattr(schedules, "get_model_type")
            else None,
            config=self.config,
        )
        if self.splits:
            self.splits[op.chunk].backward_dw()
        self.mailbox.probe.op_ends(op)
        self.sync.after_weights(weights)
        self.meter.release(key_of(op))

    def backward_input(self, op: Op) -> None:
        """Run I3: compute the input's gradient; store those of weights, if there are halves."""
        if self.splits[op.chunk].whole(self._held[key_of(op)].output):
            self.backward(op)
            return
        gradient = None if self._is_last(op) else self.mailbox.take(op)
        held, timers = self._held.pop(key_of(op)), self.config.timers
        self.mailbox.probe.op_begins()
        if timers is not None:
            timers("backward-compute", log_level=2).start()
        output = held.output
        if gradient is None and self.config.grad_scale_func is not None:
            output = self.config.grad_scale_func(output)  # as Megatron's backward_step does
        self._gradients[key_of(op)], store = self.splits[op.chunk].backward_input(
            held.received, output, gradient, held.embedded
        )
        if timers is not None:
            timers("backward-compute").stop()
        self.mailbox.probe.op_ends(op)
        self._stores[key_of(op)] = store
        self.meter.hold_half(key_of(op), store.tensors())

    def backward_weight(self, op: Op) -> None:
        """Run W3: compute the gradients of the weights, unless I3 has computed them."""
        store = self._stores.pop(key_of(op), None)
        if store is None:
            self.mailbox.probe.op_begins()
            self.mailbox.probe.op_ends(op)
            return
        self.sync.before_weights(op)
        self.mailbox.probe.op_begins()
        self.splits[op.chunk].backward_weight(store, together=self.sync.paused)
        self.mailbox.probe.op_ends(op)
        self.sync.after_weights(op)
        self.meter.release(key_of(op))

    def send_backward(self, op: Op) -> None:
        """Run SB3: send the gradient of the input."""
        gradient = self._gradients.pop(key_of(op))
        assert gradient is not None
        self.mailbox.send(op, gradient)

    def _step(
        self, op: Op, received: torch.Tensor | None, data: Any, losses: list[Any]
    ) -> tuple[torch.Tensor, Any]:
        """Run Megatron's forward of one microbatch; return its output and number of tokens."""
        output, tokens = call(
            schedules.forward_step,
            forward_step_func=self.arguments["forward_step_func"],
            data_iterator=data,
            model=self.models[op.chunk],
            num_microbatches=self.arguments["num_microbatches"],
            input_tensor=received,
            forward_data_store=losses,
            config=self.config,
            cp_group_size=self.groups.cp.size(),
            collect_non_loss_data=self.arguments.get("collect_non_loss_data", False),
            is_first_microbatch=schedules.check_first_val_step(
                self.arguments.get("first_val_step"), False, op == self._first[op.chunk]
            ),
            current_microbatch=op.microbatch,
            vp_stage=op.chunk if len(self.models) > 1 else None,
            is_last_stage=self._is_last(op),
        )
        return output, tokens

    def _drawing(self, op: Op) -> contextlib.AbstractContextManager[None]:
        if self.drawn is None:
            return contextlib.nullcontext()
        return self.drawn.of(op, position_of(op, self.stage, self.routes))

    def _is_first(self, op: Op) -> bool:
        return position_of(op, self.stage, self.routes) == 0

    def _is_last(self, op: Op) -> bool:
        return position_of(op, self.stage, self.routes) == self.routes.positions - 1

    def _embedded(self, op: Op) -> list[GradientEdge]:
        return self.splits[op.chunk].embedded() if self.splits else []

    def _deallocate(self, output: torch.Tensor) -> None:
        schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)
