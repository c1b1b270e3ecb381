"""Closed groups: ranks that meet in collectives inside ops, and so must run the same order of ops.

Where the n-th all-reduce of one replica is a forward's and that of another is a backward's, the two
hang, or add what does not belong together. So all pipelines of a closed group have one plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel

# Fields of a model's config with the number of ranks that share each weight (Megatron 0.19), and
# of mpu the functions that give their groups.
_SHARDED = {
    "gtp_weight_remat_size": "get_gtp_weight_remat_group",
    "expert_gtp_weight_remat_size": "get_expert_gtp_weight_remat_group",
}


class Tie(NamedTuple):
    """A tie binds global `ranks` to one order of ops. `why`: "" where they are of one replica."""

    ranks: tuple[int, ...]
    why: str = ""


def own_ranks() -> list[Tie]:
    """Return this rank's ties with its pipeline, and with its tensor and context parallel ranks."""
    groups = mpu.get_tensor_and_context_parallel_group(), mpu.get_pipeline_model_parallel_group()
    return [Tie(_ranks(group)) for group in groups]


def at_my_stage() -> tuple[int, ...]:
    """Return the ranks of this replica that run the same ops as this rank."""
    return _ranks(mpu.get_tensor_and_context_parallel_group())


def configured(config: Any, models: Sequence[Any]) -> list[Tie]:
    """Return the ties that follow from Megatron's settings, in releases 0.14 to 0.20.

    `config`: the model's; `models`: this rank's chunks. A tie may lie within one replica.
    """
    found = [
        (mpu.get_expert_tensor_and_model_parallel_group(), "experts are shared"),
        (_amaxes(config), "FP8 with delayed scaling reduces amaxes over replicas in each op"),
        (_balance(config), "the auxiliary loss is global (global_aux_loss)"),
        *((group, "weights are shared over replicas") for group in _shards(config)),
        (_fsdp(config, models), "FSDP gathers weights over replicas in each op"),
    ]
    if getattr(config, "hybrid_context_parallel", False):
        found.append((_replicas(), "hybrid context parallelism spans replicas"))
    return [Tie(_ranks(group), why) for group, why in found if group is not None]


def components(
    own: Iterable[Tie], others: Iterable[Tie], ranks: int
) -> tuple[list[int], dict[int, str]]:
    """Find the closed groups among so many `ranks`, each named by its lowest rank.

    Args:
        own: the ties of replicas, of all ranks.
        others: ties for a reason, of all ranks.
        ranks: of the job.

    Returns:
        The lowest rank of each rank's closed group, by rank; and by that rank, of groups with
        several replicas, the first reason.
    """
    lowest = list(range(ranks))

    def root(rank: int) -> int:
        while lowest[rank] != rank:
            lowest[rank] = lowest[lowest[rank]]
            rank = lowest[rank]
        return rank

    reasons: dict[int, str] = {}
    for tie in (*own, *others):
        roots = {root(rank) for rank in tie.ranks}
        first = min(roots)
        if tie.why and len(roots) > 1:
            reasons.setdefault(first, tie.why)
        for other in roots:
            lowest[other] = first
    found = [root(rank) for rank in range(ranks)]
    return found, {found[rank]: why for rank, why in reversed(reasons.items())}


def beyond(own: Iterable[Tie], others: Iterable[Tie]) -> str:
    """Return why this rank is in one closed group with other replicas, or an empty string.

    `own`, `others`: this rank's ties.
    """
    mine = {rank for tie in own for rank in tie.ranks}
    return next((tie.why for tie in others if not mine.issuperset(tie.ranks)), "")


def _amaxes(config: Any) -> Any:
    """Return the group over which TransformerEngine all-reduces amaxes at an op's end, or None."""
    recipe = getattr(config, "fp8_recipe", None)
    if not getattr(config, "fp8", None) or getattr(recipe, "value", recipe) != "delayed":
        return None
    alone = bool(getattr(config, "tp_only_amax_red", False))
    return mpu.get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=alone)


def _balance(config: Any) -> Any:
    """Return the group over which routers add up tokens for `global_aux_loss`, or None.

    They do so in forwards, or in backwards where forwards are recomputed.
    """
    kinds, weights = (
        getattr(config, name, None)
        for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    )
    kinds = [kinds] if isinstance(kinds, str) else list(kinds or ())
    weights = list(weights) if isinstance(weights, (list, tuple)) else [weights] * len(kinds)
    used = any(k == "global_aux_loss" and w for k, w in zip(kinds, weights, strict=False))
    if not used or not getattr(config, "num_moe_experts", None):
        return None
    return mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)


def _shards(config: Any) -> list[Any]:
    sharded = [get for name, get in _SHARDED.items() if (getattr(config, name, None) or 1) > 1]
    return [getattr(mpu, get)() for get in sharded]


def _fsdp(config: Any, models: Sequence[Any]) -> Any:
    """Return the replicas' group where Megatron's FSDP, or torch's, wraps a chunk, or None."""
    flags = ("use_megatron_fsdp", "use_custom_fsdp")
    for model in models:
        ddp = getattr(model, "ddp_config", None)
        if any(getattr(ddp, flag, False) for flag in flags):
            return _replicas()
        if not isinstance(model, DistributedDataParallel) and "Sharded" in type(model).__name__:
            return _replicas()
    return None


def _replicas() -> Any:
    return mpu.get_data_parallel_group(with_context_parallel=True)


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
