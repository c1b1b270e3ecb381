"""Every patch of Megatron and of torch that the plugin makes: what, why, when, and for how long.

`resolve` looks for all targets of a run before the first is touched. `patch` is the only way to put
something in a target's place. `--adaptra-dry-run`, scripts/drift.py, the table in docs/megatron.md
and the tests read the same registry. Megatron is not imported here, and none of this needs torch.

One more patch is not in the registry: baseline/cpu.py lets Megatron run where there is no CUDA.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

from megatron_adaptra.adapter.compat.patch_attr import find, patch_attr, switched
from megatron_adaptra.adapter.compat.profiles import misfit
from megatron_adaptra.config import SPLITTING, AdaptraConfig

_TRAINING = "megatron.training.training"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_RERUNS = "megatron.core.rerun_state_machine:RerunStateMachine"
_CONFIG = "megatron.core.model_parallel_config:ModelParallelConfig"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_LINEAR = "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication"


class Lasts(enum.Enum):
    """A member of Lasts names how long a patch is in place."""

    PROGRAM = "from the import of Megatron's training program to the end of pretrain"
    JOB = "from activation to undo"
    ITERATION = "for one call of Megatron's schedule"
    CALL = "for one call"


@dataclass(frozen=True)
class Job:
    """A job holds the facts that decide which patches a run makes.

    `stages`: of the pipeline. `chunks`: of the model, on each stage. `replicas`: data-parallel
    copies. `program`: it is Megatron's own training program, entered through our flags. `clips`:
    gradients are clipped. `demo`: stock Megatron takes turns with the plugin, and is watched.
    `device`: the pipeline's messages are in GPUs' memory.
    """

    config: AdaptraConfig
    stages: int
    chunks: int = 1
    replicas: int = 1
    program: bool = False
    clips: bool = False
    demo: bool = False
    device: bool = False

    @property
    def runs(self) -> bool:
        """True where the plugin's engines run the pipeline, and not Megatron's alone."""
        return self.stages > 1 and self.config.engine != "stock"


@dataclass(frozen=True)
class Patch:
    """An entry describes a patch of `targets`, set together: "module:name", "module:Class.name".

    `why`: one sentence. `when`: the condition in words, of which `active` is the predicate. `of`:
    the one object of the class that gets the attribute instead of the class. `feature`: what is off
    in a Megatron without one of the targets; empty where the plugin cannot do without, so that
    Megatron trains as stock. `some`: no release has all targets; those that it has are enough.
    """

    targets: tuple[str, ...]
    why: str
    lasts: Lasts
    when: str
    active: Callable[[Job], bool]
    feature: str = ""
    of: str = ""
    some: bool = False

    def present(self) -> tuple[str, ...]:
        """Return this process's targets, less those in training modules that are not imported."""
        if self.some:
            return tuple(filter(is_there, self.targets)) or self.targets
        return tuple(
            t
            for t in self.targets
            if not t.startswith("megatron.training") or t.partition(":")[0] in sys.modules
        )


def _in(holder: str, *names: str) -> tuple[str, ...]:
    separator = "." if ":" in holder else ":"
    return tuple(f"{holder}{separator}{name}" for name in names)


def _program(job: Job) -> bool:
    return job.program


def _collects(job: Job) -> bool:
    return job.runs and job.config.small_collectives != "off"


def _ends_early(job: Job) -> bool:
    return job.program and _collects(job) and not job.config.observes


def _interleaves(job: Job) -> bool:
    return job.runs and job.chunks > 1


def _executes(job: Job) -> bool:
    return job.stages > 1 and job.config.engine == "executor"


def _shares(job: Job) -> bool:
    return job.config.sync != "full"


def _watches(job: Job) -> bool:
    return job.replicas > 1 and (job.runs or _shares(job))


def _measures(job: Job) -> bool:
    return _over_own_messages(job) or job.config.budget.in_bytes


def _over_own_messages(job: Job) -> bool:
    return job.device or job.config.observes


_WITH_FLAG = "with --adaptra"  # the wrappers are there without it, too, and only call on
_COLLECTS = "several stages, unless --adaptra-small-collectives off"
_ENDS_EARLY = f"{_COLLECTS} or --adaptra-act observe"
PATCHES: Mapping[str, Patch] = {
    "flags": Patch(
        _in("megatron.training.arguments", "parse_args"),
        "adds our group of flags after the user's own, and ends a misspelt one in one line",
        Lasts.PROGRAM, _WITH_FLAG, _program,
    ),
    "checks": Patch(
        _in("megatron.training.arguments", "validate_args"),
        "checks our settings after Megatron has checked its own",
        Lasts.PROGRAM, _WITH_FLAG, _program,
    ),
    "end": Patch(
        _in(_TRAINING, "pretrain"),
        "takes everything back, however training ends",
        Lasts.PROGRAM, _WITH_FLAG, _program,
    ),
    "setup": Patch(
        _in(_TRAINING, "setup_model_and_optimizer"),
        "activates the plugin, as the process groups exist now, with the plan of a checkpoint",
        Lasts.PROGRAM, _WITH_FLAG, _program,
    ),
    "step": Patch(
        _in(_TRAINING, "train_step"),
        "knows when an iteration, with its optimizer step, is over",
        Lasts.PROGRAM, _WITH_FLAG, _program,
    ),
    "log": Patch(
        _in(_TRAINING, "training_log"),
        "writes our scalars beside Megatron's",
        Lasts.PROGRAM, _WITH_FLAG, _program,
        feature="the plan in Megatron's log and charts",
    ),
    "checkpoints": Patch(
        _in("megatron.training.checkpointing", "save_checkpoint"),
        "saves the plan beside the model's files",
        Lasts.PROGRAM, _WITH_FLAG, _program,
        feature="the plan in checkpoints",
    ),
    "schedule": Patch(
        (
            *_in(_SCHEDULES, "get_forward_backward_func"),
            *_in("megatron.core.pipeline_parallel", "get_forward_backward_func"),
            *_in(_TRAINING, "get_forward_backward_func"),
        ),
        "hands out the function that runs the plan in force",
        Lasts.JOB, "always", lambda job: True,
    ),
    "small-collectives": Patch(
        _in("torch.distributed", "all_reduce", "broadcast", "barrier"),
        "sends small collectives that cross stages directly, in one delay",
        Lasts.JOB, _COLLECTS, _collects,
        feature="small collectives sent directly",
    ),
    "gradients": Patch(
        _in(_BUCKETS, "start_grad_sync"),
        "reduces the gradients of data-parallel ranks by a collective plan",
        Lasts.JOB, "--adaptra-allreduce other than native",
        lambda job: job.config.allreduce != "native",
        feature="gradients reduced by a collective plan",
    ),
    "shards": Patch(
        (
            *_in(_BUCKETS, "start_grad_sync", "start_param_sync"),
            *_in(
                "megatron.core.distributed.param_and_grad_buffer",
                "dist_reduce_scatter_func", "dist_all_gather_func",
            ),
        ),
        "reduces gradients and gathers parameters of the distributed optimizer by plan",
        Lasts.JOB, "--adaptra-allreduce other than native",
        lambda job: job.config.allreduce != "native",
        feature="shards of the distributed optimizer by a collective plan",
    ),
    "step-result": Patch(
        (
            "megatron.core.optimizer.optimizer:MegatronOptimizer.step",
        ),
        "sees what each step returns, to know it without asking the other stages",
        Lasts.JOB, f"in Megatron's training program, {_ENDS_EARLY}", _ends_early,
        feature="results of a step without asking the other stages",
        of="this training's optimizer",
    ),
    "step-agreement": Patch(
        _in(
            _TRAINING,
            "logical_and_across_model_parallel_group",
            "reduce_max_stat_across_model_parallel_group",
        ),
        "answers at once what all stages know already",
        Lasts.JOB, f"in Megatron's training program, {_ENDS_EARLY}", _ends_early,
        feature="results of a step without asking the other stages",
    ),
    "reruns": Patch(
        _in(_RERUNS, "should_run_forward_backward"),
        "asks after an iteration, not in it, whether it has to run again",
        Lasts.JOB,
        f"in Megatron's training program, with gradient clipping, {_ENDS_EARLY}",
        lambda job: job.clips and _ends_early(job),
        feature="reruns that nobody waits for",
        of="this process's state machine",
    ),
    "log-line": Patch(
        _in(_TRAINING, "print_rank_last"),
        "adds the plan to Megatron's log line",
        Lasts.CALL, _WITH_FLAG, _program,
        feature="the plan in Megatron's log and charts",
    ),
    "interleaved-messages": Patch(
        _in(
            _CONFIG, "overlap_p2p_comm", "batch_p2p_comm", "overlap_p2p_comm_warmup_flush"
        ),
        "makes Megatron ask for a message before it needs it",
        Lasts.ITERATION, "virtual pipeline stages", _interleaves,
        feature="plans for virtual pipeline stages",
        of="this model's config",
    ),
    "op-times": Patch(
        _in(_SCHEDULES, "forward_step", "backward_step"),
        "measures ops that Megatron's own schedule runs",
        Lasts.ITERATION,
        "virtual pipeline stages; budgets in bytes; on GPUs; --adaptra-act observe; in the demo's "
        "run of stock Megatron",
        lambda job: job.demo or _interleaves(job) or (job.runs and _measures(job)),
    ),
    "message-names": Patch(
        _in("megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator", "_communicate"),
        "names the message that a lost rank was waited for with, or times it",
        Lasts.ITERATION, "on GPUs; --adaptra-act observe; in the demo's run of stock Megatron",
        lambda job: job.demo or (job.runs and _over_own_messages(job)),
    ),
    "waited-messages": Patch(
        _in("megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator", "_communicate"),
        "sees which message Megatron's own schedule waits for, to name it when nothing moves",
        Lasts.ITERATION, "several stages, unless --adaptra-hang-timeout 0",
        lambda job: job.stages > 1 and job.config.hang_timeout > 0,
        feature="the message that a hang of Megatron's own schedule waits for",
    ),
    "rehearsal": Patch(
        _in(
            "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator",
            "recv_forward", "recv_backward", "send_forward", "send_backward",
            "send_forward_recv_backward", "send_backward_recv_forward",
            "send_forward_recv_forward", "send_backward_recv_backward",
            "send_forward_backward_recv_forward_backward",
        ),
        "sends Megatron's own messages a second time, by us, and compares what arrives",
        Lasts.ITERATION, "on GPUs, in the job's third iteration, unless --adaptra-act observe",
        lambda job: job.runs and job.device and not job.config.observes,
    ),
    "emulated-sends": Patch(
        (  # torch compares an op with its own
            *_in("torch.distributed", "batch_isend_irecv", "isend"),
            *_in("torch.distributed.distributed_c10d", "isend"),
        ),
        "makes the emulated links slow for Megatron's own messages, too",
        Lasts.ITERATION,
        "--adaptra-emulate-link over gloo, where Megatron's own schedule runs; in the demo's run "
        "of it",
        lambda job: job.demo
        or (job.stages > 1 and bool(job.config.emulate_link) and not job.device),
        feature="emulated links where Megatron's own schedule runs",
    ),
    "sums": Patch(
        _in("torch.distributed", "all_reduce"),
        "adds up a bucket by plan where Megatron's start_grad_sync would all-reduce it",
        Lasts.CALL, "--adaptra-allreduce other than native",
        lambda job: job.config.allreduce != "native",
        feature="gradients reduced by a collective plan",
    ),
    "watched-ops": Patch(
        _in(
            "torch.distributed:ProcessGroup", "allreduce", "allreduce_coalesced", "allgather",
            "_allgather_base", "all_gather_single", "allgather_coalesced",
            "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "alltoall",
            "alltoall_base", "all_to_all_single", "barrier", "broadcast", "gather", "reduce",
            "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
            "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "scatter",
        ),
        "sees which ops call collectives over ranks of other replicas, and for how long they wait",
        Lasts.JOB, "several replicas", _watches,
        feature="another order of ops in one replica alone",
        some=True,
    ),
    "shares": Patch(
        _in(_CONFIG, "grad_scale_func", "finalize_model_grads_func"),
        "weighs a replica's losses by its number of microbatches, and sees when backwards are over",
        Lasts.ITERATION, "--adaptra-sync other than full", _shares,
        feature="shares of an iteration between replicas",
        of="this model's config",
    ),
    "emulated-workers": Patch(
        _in(_SCHEDULES, "forward_step", "backward_step"),
        "makes the ops of emulated slow workers slow in Megatron's own schedule, too",
        Lasts.ITERATION,
        "--adaptra-emulate-worker, where Megatron's own schedule runs; in the demo's run of it",
        lambda job: bool(job.config.emulate_worker),
    ),
    "whole-outputs": Patch(
        _in(_CONFIG, "deallocate_pipeline_outputs", "overlap_p2p_comm", "batch_p2p_comm"),
        "keeps Megatron before 0.18 from freeing what gloo still sends",
        Lasts.ITERATION, "virtual pipeline stages, where Megatron's own schedule runs",
        lambda job: job.stages > 1 and job.chunks > 1,
        feature="protection of outputs that gloo still sends",
        of="this model's config",
    ),
    "weight-gradients": Patch(
        _in(_LINEAR, "backward"),
        "leaves weight gradients out, for the second half of a backward",
        Lasts.CALL,
        "engine executor, policy adaptive, zb-h1 or zb-h2",
        lambda job: _executes(job) and job.config.policy in ("adaptive", *SPLITTING),
        feature="backwards in halves",
    ),
    "user-checkpoints": Patch(
        _in("torch.utils.checkpoint:CheckpointFunction", "forward"),
        "sees which microbatches have a backward of their own that cannot be halved",
        Lasts.ITERATION, "engine executor, policy adaptive, zb-h1 or zb-h2",
        lambda job: _executes(job) and job.config.policy in ("adaptive", *SPLITTING),
        feature="backwards in halves",
    ),
    "recompute": Patch(
        _in(_RERUNS, "validate_result"),
        "validates no loss a second time when a forward is recomputed",
        Lasts.CALL, "engine executor with --adaptra-recompute",
        lambda job: _executes(job) and job.config.recompute,
        feature="recompute",
        of="this process's state machine",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Resolved:
    """A resolution lists a run's patches. `on`: entries' ids; `off`: missing targets by such id."""

    on: frozenset[str] = frozenset(PATCHES)
    off: Mapping[str, str] = field(default_factory=dict)

    def uses(self, name: str) -> bool:
        """Return whether the job makes the patch of entry `name`."""
        return name in self.on

    def why_not(self, *ids: str) -> str:
        """Return why a feature that needs the entries of these `ids` is off, or an empty string."""
        gone = next((self.off[i] for i in ids if i in self.off), "")
        return f"this Megatron has no {gone}" if gone else ""

    def without_missing(self, config: AdaptraConfig) -> AdaptraConfig:
        """Return the settings of this run, less the features that have to be off."""
        if "small-collectives" not in self.on:
            config = replace(config, small_collectives="off")
        return replace(config, recompute=config.recompute and "recompute" not in self.off)

    def lines(self) -> list[str]:
        """Return one line for each feature that is off."""
        lines = {PATCHES[i].feature: f"this Megatron has no {gone}" for i, gone in self.off.items()}
        return [f"off: {feature}: {reason}" for feature, reason in lines.items()]


def resolve(job: Job) -> Resolved:
    """Check that every target of the run exists, and touch none.

    Raises UnsupportedMegatron if one is missing that the plugin cannot do without.
    """
    active = {name: entry for name, entry in PATCHES.items() if entry.active(job)}
    gone: dict[str, str] = {}  # by feature
    for entry in active.values():
        for target in entry.present():
            if not is_there(target):
                gone.setdefault(entry.feature, target)
    if "" in gone:
        raise misfit(f"{gone['']} does not exist")
    off = {name: gone[e.feature] for name, e in active.items() if e.feature in gone}
    return Resolved(frozenset(active.keys() - off.keys()), off)


def patch(name: str, of: Any = None, /, **values: Any) -> contextlib.ExitStack:
    """Put `values`, by attribute, in place of the targets of entry `name`; `of`: see Patch.

    Several targets of one attribute's name all get its value; those without a value are left alone.
    Use it in a `with`, or `close()` what it returns: either puts back what was there. Raises
    KeyError for an entry or an attribute that the registry does not have.
    """
    entry = PATCHES[name]
    found = [find(target) for target in entry.present()]
    if unknown := values.keys() - {attribute for _, attribute in found}:
        raise KeyError(f"patch {name} has no target {', '.join(sorted(unknown))}")
    assert (of is not None) == bool(entry.of), f"patch {name} is of {entry.of or 'no object'}"
    with contextlib.ExitStack() as stack:
        offs = []
        for attribute, value in values.items():
            owners = [owner if of is None else of for owner, other in found if other == attribute]
            if type(value) is FunctionType:  # wrapt's proxies claim to be some
                value, off = switched(value, getattr(owners[0], attribute))
                offs.append(off)
            for owner in owners:
                stack.callback(patch_attr(owner, attribute, value))
        for off in offs:
            stack.callback(off)
        return stack.pop_all()


def is_there(target: str) -> bool:
    """Return whether the installed Megatron, or torch, has `target`."""
    try:
        find(target)
    except (ImportError, AttributeError):
        return False
    return True
