"""The order of ops in which the installed Megatron runs an iteration, printed as JSON.

Megatron's own schedule function runs, once per rank, with a communicator that hands out empty
tensors, and a forward and a backward step that only write down that they were called. Standard
input: a list of [stages, microbatches, chunks]. Output: per entry and stage the ops, or the error.
"""

import json
import sys

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import torch  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

PLAIN = schedules.forward_backward_pipelining_without_interleaving
INTERLEAVED = schedules.forward_backward_pipelining_with_interleaving


class Group:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Communicator:
    """Every message is there at once, and empty."""

    def __init__(self, group: Group, config: TransformerConfig) -> None:
        self.pp_group, self.config = group, config
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        # Read from 0.17 on.
        self.current_stage, self.total_stages = group.rank(), group.size()
        self.is_pp_first_stage = group.rank() == 0
        self.is_pp_last_stage = group.rank() == group.size() - 1

    def one(self, *_: object, **__: object) -> torch.Tensor:
        return torch.empty(1)

    def pair(self, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(1), torch.empty(1)

    recv_forward = recv_backward = send_forward = send_backward = one
    send_forward_recv_forward = send_backward_recv_backward = one
    send_forward_recv_backward = send_backward_recv_forward = one
    send_forward_backward_recv_forward_backward = pair


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[str]:
    config = TransformerConfig(
        num_layers=stages * chunks,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
    )
    config.deallocate_pipeline_outputs = False
    ran: list[str] = []

    def forward_step(*_: object, current_microbatch: int, vp_stage: int | None = 0, **__: object):
        name = f"{current_microbatch}" + (f".{vp_stage}" if vp_stage else "")
        ran.append("F" + name)
        output = torch.empty(1)
        output.op = name  # type: ignore[attr-defined]
        return (output if chunks > 1 else [output]), torch.zeros([], dtype=torch.int)

    def backward_step(_: object, output: list[torch.Tensor] | torch.Tensor, *__: object):
        ran.append("B" + (output if chunks > 1 else output[0]).op)  # type: ignore
        return torch.empty(1)

    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    model = [torch.nn.Linear(1, 1) for _ in range(chunks)]
    for module in model:
        module.config, module.model_type = config, None  # type: ignore[assignment]
    pp, groups = Group(stage, stages), ProcessGroupCollection()
    groups.pp, groups.embd, groups.pos_embd = pp, None, None
    groups.tp = groups.cp = groups.dp_cp = Group(0, 1)
    (INTERLEAVED if chunks > 1 else PLAIN)(
        forward_step_func=None,
        data_iterator=[None] * chunks,
        model=model,
        num_microbatches=microbatches,
        seq_length=1,
        micro_batch_size=1,
        p2p_communicator=Communicator(pp, config),
        pg_collection=groups,
    )
    return ran


def entry(stages: int, microbatches: int, chunks: int) -> list[list[str]] | str:
    try:
        return [order(stage, stages, microbatches, chunks) for stage in range(stages)]
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


print(json.dumps([entry(*shape) for shape in json.load(sys.stdin)]))
