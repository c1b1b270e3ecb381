"""One table of limits: jobs, calls and models in which a feature of ours is left to Megatron.

Reasons that take a collective, or an iteration that is watched, stay with those who ask for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers, random

from megatron_adaptra.adapter.compat import closed_groups
from megatron_adaptra.adapter.compat.features import Effect, effect_of, has_graphs
from megatron_adaptra.adapter.compat.patches import Resolved
from megatron_adaptra.adapter.compat.profiles import (
    NEEDED_BY_EXECUTOR,
    NEWEST,
    installed_version,
    is_known,
    lacking,
)
from megatron_adaptra.adapter.compat.schedule_args import (
    ScheduleArgs,
    config_of,
    message_shape,
    models_of,
)
from megatron_adaptra.config import AUTO, AdaptraConfig
from megatron_adaptra.device.cuda import captured
from megatron_adaptra.execute.planned.exchange import FLOATS
from megatron_adaptra.ir.collective import CollectivePlan, Goal
from megatron_adaptra.ir.sync import MOST_PAIRS
from megatron_adaptra.model.all_reduce_forms import SHARDED
from megatron_adaptra.plan.reductions.selector import MOST_RANKS
from megatron_adaptra.plan.reductions.sized import FEWEST_RANKS

# Features of ours. Those with words for people are logged by them.
PIPELINE, EXECUTOR, ORDER, SHARES, REDUCTIONS = (
    "pipeline", "executor", "order", "shares", "reductions"
)  # fmt: skip
COUNTS = "counts"  # shares of so many microbatches; another number may come with a larger batch
TOGETHER = "together"  # replicas are planned together, so that work may move between them
SPLIT, RECOMPUTE = "a backward in halves", "recompute"
ROUTES, MOVED = "work for other replicas", "a microbatch that leaves the order of its replica"
WARMUP, APART = "another warmup", "a warmup of its own for each replica"

EMBEDDINGS = (layers.VocabParallelEmbedding, torch.nn.Embedding)
_LINEARS = (layers.ColumnParallelLinear, layers.RowParallelLinear)
_REST = 0.1  # share of a chunk's parameters whose gradients may be kept between the halves
_RANDOM = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
# mHC (hyper-connections): the field that turns it on, and the one with the number of residual
# streams, in branches main and dev of Megatron-LM.
_STREAMS = (
    ("enable_mhc_connections", "mhc_num_residual_streams"),
    ("enable_hyper_connections", "num_residual_streams"),
)


@dataclass(frozen=True)
class Case:
    """A case describes a job in which a feature of ours is wanted.

    `ours`: the job's settings. `arguments`: those of a call of Megatron's schedule `function`; none
    before the first. `on_device`: messages are in GPUs' memory.
    """

    ours: AdaptraConfig
    arguments: ScheduleArgs = field(default_factory=dict)
    function: Any = None
    patches: Resolved = field(default_factory=Resolved)
    on_device: bool = False

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return config_of(self.arguments)

    @property
    def models(self) -> list[Any]:
        """The model chunks of this stage."""
        return models_of(self.arguments)


class Collective(NamedTuple):
    """A collective reduces or gathers `tensors` over data-parallel `ranks`, as REDUCTIONS' case.

    `name`: the setting, of an algorithm or of a file with the `given` plan. `config`: of DDP.
    """

    name: str
    given: CollectivePlan | None
    goal: Goal
    ranks: int
    tensors: Sequence[torch.Tensor] = ()
    config: Any = None


class Row(NamedTuple):
    """A row limits `features` by one `reason`, whose gaps are filled by what `applies` returns."""

    features: Set[str]
    applies: Callable[[Any], Any]
    reason: str


def why_not(feature: str, case: Case | Collective) -> str:
    """Return the reason of the first row that limits a `feature` in this `case`, or ""."""
    for row in ROWS:
        if feature in row.features and (found := row.applies(case)):
            return row.reason.format(*(found if isinstance(found, tuple) else (found,)))
    return ""


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


def no_states() -> str:
    """Return why a forward cannot get random states of its own, or an empty string."""
    _, device, tracked = random._get_all_rng_states()
    if all(isinstance(state, torch.Tensor) for state in (device, *tracked.values())):
        return ""
    return "its generators are held by CUDA graphs"  # objects, which a replay goes on from


def own_generator(model: torch.nn.Module) -> str:
    """Return the type of a module in `model` that has a generator of its own, or "" for none."""
    for module in model.modules():
        if any(isinstance(value, torch.Generator) for value in vars(module).values()):
            return type(module).__name__
    return ""


def delays(module: torch.nn.Module) -> bool:
    """Return whether `module`, a layer of TransformerEngine, stores its weight gradient itself."""
    config = getattr(module, "config", None)
    return (
        hasattr(module, "backward_dw")
        and bool(getattr(config, "delay_wgrad_compute", False))
        and type(module).__module__.endswith("transformer_engine")
    )


def _has(name: str) -> Callable[[Case], Any]:
    return lambda case: getattr(case.config, name, None)


def _first(find: Callable[[Any], Any]) -> Callable[[Case], Any]:
    """Return a condition: what `find` returns for the first chunk of a case that it applies to."""
    return lambda case: next(filter(None, map(find, case.models)), None)


def _interleaved(applies: Callable[[Case], Any]) -> Callable[[Case], Any]:
    """Return the condition `applies`, of interleaved schedules that our engines are to run."""
    interleaved = schedules.forward_backward_pipelining_with_interleaving
    return lambda case: (
        case.function is interleaved and case.ours.engine != "stock" and applies(case)
    )


def _other_ranks(case: Case) -> tuple[list[int], list[int]] | None:
    """Return the ranks of a call's pipeline, and of Megatron's own, where they differ."""
    if (group := getattr(case.arguments.get("pg_collection"), "pp", None)) is None:
        return None
    theirs, ours = (
        dist.get_process_group_ranks(one)
        for one in (group, mpu.get_pipeline_model_parallel_group())
    )
    return None if theirs == ours else (theirs, ours)


def _odd_groups(case: Case) -> tuple[int, int] | None:
    """Return the microbatches, and the size of their groups, where these are no whole rounds."""
    stages, count = mpu.get_pipeline_model_parallel_world_size(), case.arguments["num_microbatches"]
    group = getattr(case.config, "microbatch_group_size_per_vp_stage", None) or stages
    return (count, group) if group != stages or count % stages else None


def _other_width(case: Case) -> tuple[str, int, int, Any] | None:
    """Return the flag of mHC, the width of messages, and the two numbers it should come from."""
    for flag, number in _STREAMS:
        if not getattr(case.config, flag, False):
            continue
        streams, width = getattr(case.config, number, None), message_shape(case.arguments)[-1]
        if streams is None or width != case.config.hidden_size * streams:
            return flag.replace("_", "-"), width, case.config.hidden_size, streams
    return None


def _unsplit(model: torch.nn.Module) -> str:
    """Return why the weight gradients of a `model` chunk cannot be stored, or an empty string."""
    if any(p._backward_hooks for p in model.parameters()):
        return "tensor hooks on parameters"
    rest: dict[str, int] = {}
    for module in model.modules():
        if not isinstance(module, (*EMBEDDINGS, *_LINEARS)) and not delays(module):
            own = (p.numel() for p in module.parameters(recurse=False) if p.requires_grad)
            name = type(module).__name__
            rest[name] = rest.get(name, 0) + sum(own)
    if sum(rest.values()) > _REST * sum(p.numel() for p in model.parameters()):
        name = max(rest, key=lambda name: rest[name])
        return f"{name}, whose weight gradients cannot be stored"
    return ""


def _too_many(case: Case) -> int:
    """Return the microbatches of an iteration, in all replicas, where they are too many."""
    total = int(case.arguments["num_microbatches"] * mpu.get_data_parallel_world_size())
    return total if total > MOST_PAIRS else 0


def _met(case: Case) -> str:
    """Return why ops of this rank meet other replicas, by Megatron's settings, or ""."""
    ties = closed_groups.configured(case.config, case.models)
    return closed_groups.beyond(closed_groups.own_ranks(), ties)


def _gathers_ahead(model: Any) -> bool:
    """Return whether a forward gathers parameters, which an idle worker does not have."""
    return bool(getattr(getattr(model, "ddp_config", None), "overlap_param_gather", False))


def _unwrapped(model: Any) -> str:
    return "" if isinstance(model, DistributedDataParallel) else type(model).__name__


def _draws(case: Case) -> tuple[str, str] | None:
    """Return what draws random numbers, and why they cannot go by home, where both are so."""
    names = [name for name in _RANDOM if getattr(case.config, name, None)]
    for module in (module for model in case.models for module in model.modules()):
        share = getattr(module, "p", 0.0)
        if "Dropout" in type(module).__name__ and isinstance(share, (int, float)) and share > 0:
            names.append("nn.Dropout")
    why = no_states() if names else ""
    return (names[0], why) if why else None


def _unfit(one: Collective) -> str:
    """Describe the first tensor that a plan cannot reduce or gather, or return ""."""
    for data in one.tensors:
        if data.device.type == "cuda" and one.name == AUTO:
            if captured():
                return "captured into a CUDA graph"
            continue  # measured alone
        if data.layout != torch.strided or data.device.type != "cpu":
            return f"{data.layout} on {data.device.type}, not dense on the CPU"
        if data.dtype not in FLOATS or not data.is_contiguous():
            return f"{data.dtype} with strides {data.stride()}"
    return ""


ROWS = (
    Row({PIPELINE}, lambda case: case.arguments.get("forward_only"), "evaluation"),
    Row({PIPELINE}, lambda case: effect_of(case.config, Effect.STOCK), "{}"),
    Row({PIPELINE}, _other_ranks, "a pipeline of ranks {}, Megatron's state has {}"),
    Row({PIPELINE}, _interleaved(lambda case: case.patches.why_not("interleaved-messages")),
        "interleaved, {}"),
    Row({PIPELINE}, _interleaved(_odd_groups), "interleaved, with {} microbatches in groups of {}"),
    Row({PIPELINE}, _interleaved(_has("overlap_moe_expert_parallel_comm")),
        "interleaved, with overlapped expert parallel messages"),
    Row({PIPELINE}, lambda case: case.function is schedules.forward_backward_no_pipelining,
        "one stage"),
    Row({PIPELINE}, lambda case: not_megatrons(case.function), "{}"),
    Row({PIPELINE}, _has("variable_seq_lengths"), "variable sequence lengths"),
    Row({PIPELINE}, _has("mtp_standalone"), "stand-alone multi-token prediction"),
    Row({PIPELINE}, lambda case: case.arguments.get("p2p_communicator") is not None,
        "a communicator of the caller's own"),
    Row({PIPELINE}, lambda case: case.arguments.get("adjust_tensor_shapes_fn") is not None,
        "adjusted tensor shapes"),
    Row({PIPELINE}, _other_width, "--{}: Megatron's get_tensor_shapes gives messages of {} values, "
        "not {} for each of {} residual streams"),

    Row({EXECUTOR}, lambda _: lacking(NEEDED_BY_EXECUTOR), "a Megatron in which {}"),
    Row({EXECUTOR}, lambda _: not is_known() and (installed_version(), NEWEST),
        "megatron-core {}, newer than {}"),
    Row({EXECUTOR}, _has("num_microbatches_with_partial_activation_checkpoints"),
        "partial activation checkpoints"),
    Row({EXECUTOR}, _has("fine_grained_activation_offloading"), "activation offloading"),
    Row({EXECUTOR}, _has("moe_paged_stash"), "MoE paged stash"),
    Row({EXECUTOR}, _has("mtp_num_layers"), "multi-token prediction"),
    Row({EXECUTOR}, _has("overlap_moe_expert_parallel_comm"),
        "overlapped expert parallel messages"),
    Row({EXECUTOR},
        lambda case: getattr(case.config, "cuda_graph_impl", None) not in (None, "none"),
        "CUDA graphs"),

    Row({SPLIT}, lambda case: case.patches.why_not("weight-gradients"), "{}"),
    Row({SPLIT}, lambda case: getattr(case.config, "recompute_granularity", None) is not None,
        "Megatron's own activation recompute"),
    Row({SPLIT}, lambda case: getattr(case.config, "generalized_tensor_parallel_remat_size", 1) > 1,
        "rematerialised tensor parallel weights"),
    Row({SPLIT}, _first(_unsplit), "{}"),
    Row({RECOMPUTE}, _has("fp8"), "fp8 scaling"),
    Row({RECOMPUTE}, _has("fp4"), "fp4 scaling"),

    Row({WARMUP}, lambda case: case.patches.why_not("watched-ops"), "{}"),
    Row({ORDER, MOVED}, lambda case: effect_of(case.config, Effect.PINNED), "{}"),
    Row({MOVED}, _first(_gathers_ahead), "--overlap-param-gather needs a forward on each worker"),
    Row({MOVED}, _first(own_generator),
        "{} draws from a generator of its own, in the order of ops"),
    Row({MOVED}, _draws, "{} draws random numbers, and {}"),

    Row({TOGETHER}, lambda case: case.ours.engine == "stock",
        "--adaptra-engine stock plans nothing"),
    Row({TOGETHER}, lambda case: case.ours.policy != "adaptive" and case.ours.policy,
        "--adaptra-policy {} never changes"),
    Row({TOGETHER}, lambda case: case.on_device, "messages are on GPUs"),
    Row({SHARES}, lambda case: case.patches.why_not("shares", "watched-ops"), "{}"),
    Row({SHARES, COUNTS}, _too_many, f"an iteration has {{}}, at most {MOST_PAIRS} are shared out"),
    Row({SHARES}, lambda case: case.ours.sync != "auto" and case.ours.reroute != "off"
        and case.ours.reroute,
        "--adaptra-reroute {} moves microbatches itself; --adaptra-sync auto takes one or the "
        "other"),
    Row({TOGETHER, SHARES}, lambda _: mpu.get_data_parallel_world_size() == 1,
        "there is one replica"),
    Row({TOGETHER}, lambda _: mpu.get_pipeline_model_parallel_world_size() == 1,
        "there is one stage"),
    Row({TOGETHER, SHARES},
        lambda _: (mpu.get_virtual_pipeline_model_parallel_world_size() or 1) > 1,
        "there are virtual stages"),
    Row({TOGETHER, SHARES}, lambda _: mpu.get_expert_model_parallel_world_size() > 1,
        "replicas share experts"),
    Row({SHARES}, lambda case: has_graphs(case.config),
        "CUDA graphs were recorded for as many microbatches"),
    Row({SHARES}, _has("moe_grad_scale_func"), "a function of its own scales losses of experts"),
    Row({SHARES}, _has("mtp_grad_scale_func"),
        "a function of its own scales losses of later tokens"),
    Row({SHARES}, _met, "replicas meet inside ops: {}"),
    Row({SHARES}, _first(_unwrapped), "gradients of a {} may be reduced more than once"),

    Row({REDUCTIONS}, lambda one: one.goal is Goal.REDUCE_SCATTER
        and getattr(one.config, "reduce_scatter_with_fp32_accumulation", False),
        "its reduce-scatter adds in fp32 by a way of its own"),
    Row({REDUCTIONS}, lambda one: one.goal is Goal.ALL_GATHER
        and getattr(one.config, "reuse_grad_buf_for_mxfp8_param_ag", False),
        "parameters of 8 bits share their memory with gradients"),
    Row({REDUCTIONS}, _unfit, "they are {}"),
    Row({REDUCTIONS}, lambda one: one.given and one.given.goal is not one.goal
        and (one.name, one.given.goal.value), "the plan of {} is of another goal: {}"),
    Row({REDUCTIONS}, lambda one: one.given and one.given.ranks != one.ranks
        and (one.name, one.given.ranks, one.ranks), "the plan of {} is for {} ranks, here is {}"),
    Row({REDUCTIONS}, lambda one: not one.given and one.goal is not Goal.ALL_REDUCE
        and one.name not in (AUTO, *SHARDED) and (one.name, one.goal.value), "{} has no {}"),
    Row({REDUCTIONS}, lambda one: not one.given and one.ranks < FEWEST_RANKS.get(one.name, 2)
        and (one.name, FEWEST_RANKS.get(one.name, 2), one.ranks), "{} needs {} ranks, here is {}"),
    Row({REDUCTIONS}, lambda one: one.name == AUTO and one.ranks > MOST_RANKS
        and (one.name, MOST_RANKS, one.ranks),  # each would be connected with each
        "{} chooses for at most {} ranks, here are {}"),
)  # fmt: skip
