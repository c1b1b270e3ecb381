"""The executor seam: handlers that run ops through Megatron's forward_step and backward_step.

What surrounds the ops of an iteration (gradient synchronisation, deallocation of sent outputs,
finalisation of gradients) follows Megatron's schedule, so that losses and parameters are the same.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from megatron_adaptra.adapter.profiles import call
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Line
from megatron_adaptra.runtime.executor import execute
from megatron_adaptra.runtime.mailbox import Mailbox


@dataclass
class MegatronStage:
    """One training iteration of one stage. `arguments` are those of Megatron's schedule."""

    line: Line
    mailbox: Mailbox
    arguments: dict[str, Any]
    groups: Any
    first: bool
    last: bool
    inputs: dict[int, torch.Tensor | None] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor | None] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        model, data = self.arguments["model"], self.arguments["data_iterator"]
        self.model: Any = model[0] if isinstance(model, list) else model
        self.data: Any = data[0] if isinstance(data, list) else data
        self.config = schedules.get_model_config(self.model)
        self.tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
        self._no_sync: Any = None
        self._last_backward = next(op for op in reversed(self.line) if op.kind is Kind.B)

    def run(self) -> list[Any]:
        """Run the line; what the last stage's loss function returned, per microbatch."""
        config, finalize = self.config, self.config.finalize_model_grads_func
        embedding = None
        if finalize is not None:
            embedding = schedules.clear_embedding_activation_buffer(config, self.model, self.last)
        self._pause_gradient_sync()
        post = self.mailbox.post
        execute(
            self.line,
            {
                Kind.F: self.forward,
                Kind.B: self.backward,
                Kind.POST_F: post,
                Kind.POST_B: post,
                Kind.SEND_F: self.send_forward,
                Kind.SEND_B: self.send_backward,
            },
        )
        if self._no_sync is not None:
            self._resume_gradient_sync()
            if config.grad_sync_func is not None:
                config.grad_sync_func(self.model.parameters())
        if finalize is not None:
            schedules.finish_embedding_wgrad_compute(config, embedding, self.last, self.groups.tp)
            call(
                finalize,
                model=[self.model],
                num_tokens=self.tokens if config.calculate_per_token_loss else None,
                pg_collection=self.groups,
                grad_finalize_pgs=self.groups,
                force_all_reduce=self.arguments.get("force_all_reduce", False),
            )
        return self.losses

    def forward(self, op: Op) -> None:
        tensor = None if self.first else self.mailbox.take(op)
        if tensor is not None:
            tensor.requires_grad_()
        self.mailbox.probe.op_begins()
        output, tokens = call(
            schedules.forward_step,
            forward_step_func=self.arguments["forward_step_func"],
            data_iterator=self.data,
            model=self.model,
            num_microbatches=self.arguments["num_microbatches"],
            input_tensor=tensor,
            forward_data_store=self.losses,
            config=self.config,
            cp_group_size=self.groups.cp.size(),
            collect_non_loss_data=self.arguments.get("collect_non_loss_data", False),
            is_first_microbatch=schedules.check_first_val_step(
                self.arguments.get("first_val_step"), False, op.microbatch == 0
            ),
            current_microbatch=op.microbatch,
            is_last_stage=self.last,
        )
        self.mailbox.probe.op_ends(op)
        self.tokens += tokens
        self.inputs[op.microbatch], self.outputs[op.microbatch] = tensor, output
        if self.last:
            self._deallocate(output)

    def send_forward(self, op: Op) -> None:
        output = self.outputs[op.microbatch]
        self.mailbox.send(op, output)
        self._deallocate(output)  # the mailbox has its copy

    def backward(self, op: Op) -> None:
        gradient = None if self.last else self.mailbox.take(op)
        synchronises = self.config.grad_sync_func is None or self.first
        if op == self._last_backward and synchronises:
            self._resume_gradient_sync()
        self.mailbox.probe.op_begins()
        self.gradients[op.microbatch] = call(
            schedules.backward_step,
            input_tensor=self.inputs.pop(op.microbatch),
            output_tensor=self.outputs.pop(op.microbatch),
            output_tensor_grad=gradient,
            model_type=schedules.get_model_type(self.model)
            if hasattr(schedules, "get_model_type")
            else None,
            config=self.config,
        )
        self.mailbox.probe.op_ends(op)

    def send_backward(self, op: Op) -> None:
        gradient = self.gradients.pop(op.microbatch)
        assert gradient is not None
        self.mailbox.send(op, gradient)

    def _deallocate(self, output: torch.Tensor) -> None:
        schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def _pause_gradient_sync(self) -> None:
        self._no_sync = (self.config.no_sync_func or contextlib.nullcontext)()
        self._no_sync.__enter__()

    def _resume_gradient_sync(self) -> None:
        if self._no_sync is not None:
            self._no_sync.__exit__(None, None, None)
            self._no_sync = None


def unsupported(config: Any) -> str:
    """Why the executor cannot run this model, or an empty string."""
    reasons = {
        "num_microbatches_with_partial_activation_checkpoints": "partial activation checkpoints",
        "fine_grained_activation_offloading": "activation offloading",
        "moe_paged_stash": "MoE paged stash",
        "num_moe_experts": "mixture of experts",
        "mtp_num_layers": "multi-token prediction",
    }
    for name, words in reasons.items():
        if getattr(config, name, None):
            return words
    graphs = getattr(config, "cuda_graph_impl", None)
    return "CUDA graphs" if graphs not in (None, "none") else ""
