"""Limits of the plugin: calls of Megatron's, models and releases that it leaves to Megatron."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import schedules

from megatron_adaptra.adapter.compat.features import Effect, effect_of
from megatron_adaptra.adapter.compat.patches import Resolved
from megatron_adaptra.adapter.compat.profiles import (
    NEEDED_BY_EXECUTOR,
    NEWEST,
    installed_version,
    is_known,
    lacking,
)
from megatron_adaptra.adapter.compat.schedule_args import config_of, message_shape, models_of
from megatron_adaptra.adapter.pipeline.recompute import recompute_reason
from megatron_adaptra.adapter.pipeline.split import split_reason
from megatron_adaptra.config import SPLITTING, AdaptraConfig

SPLIT, RECOMPUTE = "a backward in halves", "recompute"  # what a model may not allow
# mHC (hyper-connections): the field that turns it on, and the one with the number of residual
# streams, in branches main and dev of Megatron-LM.
_STREAMS = (
    ("enable_mhc_connections", "mhc_num_residual_streams"),
    ("enable_hyper_connections", "num_residual_streams"),
)


def not_ours(
    function: Any, arguments: dict[str, Any], engine: str, stages: int, patches: Resolved
) -> str:
    """Return why a call of `function`, a schedule, is left to Megatron, or an empty string.

    `arguments`: of the call. `engine`: the setting. `stages`: of the pipeline.
    """
    if arguments.get("forward_only"):
        return "evaluation"
    config = config_of(arguments)
    if reason := effect_of(config, Effect.STOCK) or _not_our_ranks(arguments):
        return reason
    if function is schedules.forward_backward_pipelining_with_interleaving:
        reason = patches.why_not("interleaved-messages") or _not_our_chunks(arguments, stages)
        if engine != "stock" and reason:
            return f"interleaved, {reason}"
    elif function is schedules.forward_backward_no_pipelining:
        return "one stage"
    elif function is not schedules.forward_backward_pipelining_without_interleaving:
        return not_megatrons(function)
    if getattr(config, "variable_seq_lengths", False):
        return "variable sequence lengths"
    if getattr(config, "mtp_standalone", False):
        return "stand-alone multi-token prediction"
    if arguments.get("p2p_communicator") is not None:
        return "a communicator of the caller's own"
    if arguments.get("adjust_tensor_shapes_fn") is not None:
        return "adjusted tensor shapes"
    return _not_our_width(arguments)


def not_megatrons(function: Any) -> str:
    """Describe what stands in for Megatron's schedules, and what to do; "" for one of its own.

    `function`: what Megatron's get_forward_backward_func gives.
    """
    if function in (
        schedules.forward_backward_no_pipelining,
        schedules.forward_backward_pipelining_without_interleaving,
        schedules.forward_backward_pipelining_with_interleaving,
    ):
        return ""
    module, name = type(function).__module__, type(function).__qualname__
    if (code := getattr(function, "__code__", None)) is not None:  # a wrapper may bear any name
        module, name = function.__globals__.get("__name__", ""), code.co_name
    return (
        f"get_forward_backward_func gives {module}.{name}, not a schedule of Megatron's; to adapt "
        "it, put it in place once the plugin is active, so that it calls the plugin's function"
    )


def _not_our_width(arguments: dict[str, Any]) -> str:
    """Return why the width of messages under mHC is not known, or an empty string."""
    config = config_of(arguments)
    for flag, number in _STREAMS:
        if not getattr(config, flag, False):
            continue
        streams, width = getattr(config, number, None), message_shape(arguments)[-1]
        if streams is None or width != config.hidden_size * streams:
            return (
                f"--{flag.replace('_', '-')}: Megatron's get_tensor_shapes gives messages of "
                f"{width} values, not {config.hidden_size} for each of {streams} residual streams"
            )
    return ""


def _not_our_ranks(arguments: dict[str, Any]) -> str:
    """Return how a pipeline differs from the one in Megatron's state, or an empty string."""
    group = getattr(arguments.get("pg_collection"), "pp", None)
    if group is None:
        return ""
    theirs, ours = (
        dist.get_process_group_ranks(one)
        for one in (group, mpu.get_pipeline_model_parallel_group())
    )
    return "" if theirs == ours else f"a pipeline of ranks {theirs}, Megatron's state has {ours}"


def _not_our_chunks(arguments: dict[str, Any], stages: int) -> str:
    """Return why an interleaved schedule is not of the kind that we run, or an empty string."""
    config, count = config_of(arguments), arguments["num_microbatches"]
    group = getattr(config, "microbatch_group_size_per_vp_stage", None) or stages
    if group != stages or count % stages:
        return f"with {count} microbatches in groups of {group}"
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        return "with overlapped expert parallel messages"
    return ""


def unsupported(arguments: dict[str, Any]) -> str:
    """Return why the executor cannot run this model on this release, or an empty string.

    `arguments`: those of Megatron's schedule.
    """
    if words := lacking(NEEDED_BY_EXECUTOR):
        return f"a Megatron in which {words}"
    if not is_known():
        return f"megatron-core {installed_version()}, newer than {NEWEST}"
    config = config_of(arguments)
    reasons = {
        "num_microbatches_with_partial_activation_checkpoints": "partial activation checkpoints",
        "fine_grained_activation_offloading": "activation offloading",
        "moe_paged_stash": "MoE paged stash",
        "mtp_num_layers": "multi-token prediction",
        "overlap_moe_expert_parallel_comm": "overlapped expert parallel messages",
    }
    for name, words in reasons.items():
        if getattr(config, name, None):
            return words
    graphs = getattr(config, "cuda_graph_impl", None)
    return "CUDA graphs" if graphs not in (None, "none") else ""


def limits_of(
    arguments: dict[str, Any], config: AdaptraConfig, patches: Resolved
) -> dict[str, str]:
    """Return, for each feature that the executor is asked for, why it cannot have it, or "".

    `arguments`: those of Megatron's schedule.
    """
    limits = {}
    if config.policy in ("adaptive", *SPLITTING):
        theirs = config_of(arguments)
        reasons = (split_reason(model, theirs) for model in models_of(arguments))
        limits[SPLIT] = patches.why_not("weight-gradients") or next(filter(None, reasons), "")
    if config.recompute:
        limits[RECOMPUTE] = recompute_reason(config_of(arguments))
    return limits
