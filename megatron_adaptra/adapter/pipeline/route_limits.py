"""Jobs that can have routes between replicas, and the reasons why others cannot.

Megatron's groups decide whether replicas are planned together at all (`apart`). Models and data,
which the first iteration shows, limit what a plan may do (`limits`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import random

from megatron_adaptra.adapt.routes.remedy import ALIKE, NO_ROUTES
from megatron_adaptra.adapter.compat.features import Effect, effect_of
from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs, config_of, models_of
from megatron_adaptra.adapter.pipeline.closed_groups import WARMUP
from megatron_adaptra.adapter.pipeline.home_random import no_states, own_generator
from megatron_adaptra.adapter.pipeline.job_gather import from_all_ranks
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.ir.schedule import Schedule

ROUTES = "work for other replicas"  # limits, as they are logged
APART = "a warmup of its own for each replica"
MOVED = "a microbatch that leaves the order of its replica"
_RANDOM = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")


def apart(config: AdaptraConfig, on_device: bool) -> str:
    """Return why each replica is planned by itself although routes are asked for, or "".

    `on_device`: messages are in GPUs' memory. Megatron's groups exist.
    """
    if config.engine == "stock":
        return "--adaptra-engine stock plans nothing"
    if config.policy != "adaptive":
        return f"--adaptra-policy {config.policy} never changes"
    if on_device:
        return "messages are on GPUs"
    if mpu.get_data_parallel_world_size() == 1:
        return "there is one replica"
    if mpu.get_pipeline_model_parallel_world_size() == 1:
        return "there is one stage"
    if (mpu.get_virtual_pipeline_model_parallel_world_size() or 1) > 1:
        return "there are virtual stages"
    if mpu.get_expert_model_parallel_world_size() > 1:
        return "replicas share experts"
    return ""


def limits(arguments: ScheduleArgs, data: str, moves: bool) -> dict[str, str]:
    """Return what this job's plans must not do, each with its reason or "". A collective of all.

    `arguments`: those of Megatron's schedule, before the first iteration. `data`: why batches of
    other replicas cannot be read, or an empty string. `moves`: microbatches may leave their order.
    """
    return {ROUTES: _other_states() or data, MOVED: _order_counts(arguments) if moves else ""}


def mode_of(asked: str, found: Mapping[str, str], executes: bool) -> str:
    """Choose the mode of routes: as `asked`, or narrower by the `found` limits of all ranks.

    `executes`: our executor runs the ops; Megatron's own schedule has one order.
    """
    if found.get(APART):
        return ALIKE
    if found.get(ROUTES) or found.get(WARMUP):
        return NO_ROUTES
    return asked if executes and not found.get(MOVED) else "swap"


def allows(mode: str, schedule: Schedule) -> bool:
    """Return whether a plan of this `mode` may be this `schedule`."""
    if mode == ALIKE:
        return schedule.alike
    if mode == "auto" or not schedule.routes.moved:
        return True
    return mode == "swap" and schedule.keeps_order


def _order_counts(arguments: ScheduleArgs) -> str:
    """Return why a worker has to run microbatches in Megatron's order, each number once, or "".

    Random numbers are no reason where forwards can draw them by home.
    """
    config, models = config_of(arguments), models_of(arguments)
    if pinned := effect_of(config, Effect.PINNED):
        return pinned
    wrapped = (getattr(model, "ddp_config", None) for model in models)
    if any(getattr(one, "overlap_param_gather", False) for one in wrapped):
        return "--overlap-param-gather needs a forward on each worker"  # an idle one has none
    if owner := next(filter(None, map(own_generator, models)), ""):
        return f"{owner} draws from a generator of its own, in the order of ops"
    names = [name for name in _RANDOM if getattr(config, name, None)]
    modules = (module for model in models for module in model.modules())
    names += ["nn.Dropout" for m in modules if "Dropout" in type(m).__name__ and _random(m)]
    why = no_states() if names else ""
    return f"{names[0]} draws random numbers, and {why}" if why else ""


def _random(module: Any) -> bool:
    probability = getattr(module, "p", 0.0)
    return isinstance(probability, (int, float)) and probability > 0


def _other_states() -> str:
    """Return why random numbers differ between replicas, or ""; a collective of all ranks."""
    cpu, device, tracked = random._get_all_rng_states()
    digest = hashlib.sha256()
    for state in (cpu, device, *(tracked[name] for name in sorted(tracked))):
        given = state.cpu().numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state)
        digest.update(given if isinstance(given, bytes) else given.encode())
    place = (
        mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank(),
        mpu.get_context_parallel_rank(),
    )  # fmt: skip
    first: dict[Any, str] = {}
    for where, found in from_all_ranks((place, digest.hexdigest())):
        if first.setdefault(where, found) != found:
            return "random states differ between replicas (--data-parallel-random-init)"
    return ""
