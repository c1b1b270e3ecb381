"""The arguments of Megatron's schedule functions, and the process groups they use by default."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import schedules

from megatron_adaptra.adapter.compat.profiles import call

ScheduleArgs = dict[str, Any]  # keyword arguments of Megatron's schedule functions

# The pipeline's group as a middle stage sees it. With mHC the first stage's input and the last
# stage's output, which are no messages, are narrower than messages.
_MIDDLE = types.SimpleNamespace(rank=lambda: 1, size=lambda: 3)


def models_of(arguments: ScheduleArgs) -> list[Any]:
    """Return the model chunks of this stage."""
    model = arguments["model"]
    return list(model) if isinstance(model, list) else [model]


def config_of(arguments: ScheduleArgs) -> Any:
    """Return the model's configuration."""
    return schedules.get_model_config(models_of(arguments)[0])


def only(data: Any) -> Any:
    """Return the iterator in `data`, of a stage with one chunk: Megatron may put it into a list."""
    return data[0] if isinstance(data, list) else data


def message_shape(arguments: ScheduleArgs) -> tuple[int, ...]:
    """Return (sequence, microbatch, hidden) of every message, by Megatron's own function.

    With mHC it multiplies hidden by the number of residual streams. The same on all ranks.
    """
    (shape,) = call(
        schedules.get_tensor_shapes,
        seq_length=arguments["seq_length"],
        micro_batch_size=arguments["micro_batch_size"],
        decoder_seq_length=arguments.get("decoder_seq_length"),
        config=config_of(arguments),
        tp_group=mpu.get_tensor_model_parallel_group(),
        cp_group=mpu.get_context_parallel_group(),
        pp_group=_MIDDLE,
    )
    return tuple(shape)


def message_of(arguments: ScheduleArgs) -> Callable[[], torch.Tensor]:
    """Return a function that makes empty tensors of a message's shape, on the current device."""
    dtype, device = config_of(arguments).pipeline_dtype, torch.cuda.current_device()
    like = torch.empty(0, dtype=dtype, device=device)
    # A tenth of the time of an empty() with all arguments.
    return functools.partial(like.new_empty, message_shape(arguments))


def message_bytes(arguments: ScheduleArgs) -> int:
    """Return the bytes of a message between stages."""
    return int(math.prod(message_shape(arguments)) * config_of(arguments).pipeline_dtype.itemsize)


def default_groups() -> Any:
    """Return the process groups that Megatron's schedule would use by itself."""
    if hasattr(schedules, "_build_default_pg_collection"):
        return schedules._build_default_pg_collection()
    if hasattr(schedules, "ProcessGroupCollection"):
        groups = schedules.ProcessGroupCollection()
        groups.tp_dp_cp = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
    else:
        groups = schedules.GradFinalizeProcessGroups()
    groups.tp = mpu.get_tensor_model_parallel_group()
    groups.cp = mpu.get_context_parallel_group()
    groups.pp = mpu.get_pipeline_model_parallel_group()
    groups.embd = mpu.get_embedding_group(check_initialized=False)
    groups.pos_embd = mpu.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = call(
        mpu.get_data_parallel_group, with_context_parallel=True, partial_data_parallel=False
    )
    return groups
