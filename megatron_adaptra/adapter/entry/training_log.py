"""Our additions to what people see of a training: Megatron's log line, TensorBoard and W&B."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

from megatron_adaptra.adapter.compat.patches import patch
from megatron_adaptra.adapter.entry.activate import Activation
from megatron_adaptra.adapter.pipeline.run import Run
from megatron_adaptra.adapter.pipeline.session import Session

_LOG_LINE = "elapsed time per iteration"  # in Megatron's own line, in every release


def lengthen_line(session: Session, stack: contextlib.ExitStack) -> None:
    """Add the plan of `session` to the end of Megatron's log line, until `stack` is left."""
    from megatron.training import training

    original, text = training.print_rank_last, f" adaptra: {summary(session.run)} |"

    def print_rank_last(message: Any) -> None:
        original(f"{message}{text}" if _LOG_LINE in str(message) else message)

    stack.enter_context(patch("log-line", print_rank_last=print_rank_last))


def write_scalars(activation: Activation, training_log: Any, args: Any, kwargs: Any) -> None:
    """Write our scalars beside Megatron's; `args`, `kwargs`: of a call of its `training_log`."""
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

    iteration = inspect.signature(training_log).bind(*args, **kwargs).arguments["iteration"]
    found = scalars(activation.session.run)
    found |= replica_scalars(activation.reductions, activation.shares)
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is None or iteration % get_args().tensorboard_log_interval:
        return
    for name, value in found.items():
        tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(found, iteration)


def summary(run: Run | None) -> str:
    """Describe the plan that the last iteration ran, the same on every rank of the plan group.

    By the time when Megatron logs an iteration, `run` has begun the next one.
    """
    if run is None or run.abandoned:
        return "stock"
    return f"warmup {','.join(map(str, run.ran.warmup))}"


def scalars(run: Run | None) -> dict[str, float]:
    """Return values for charts by name; delays are known on the leader and on the last rank."""
    if run is None or run.abandoned:
        return {}
    status = run.controller.status
    found = {f"adaptra/warmup/stage-{i}": float(d) for i, d in enumerate(run.ran.warmup)}
    for link, seconds in status.get("delays", {}).items():
        found[f"adaptra/delay-ms/{link.replace('>', '-to-')}"] = 1e3 * seconds
    for name in ("predicted", "lower_bound"):
        if name in status:
            found[f"adaptra/{name.replace('_', '-')}-ms"] = 1e3 * status[name]
    if "replans" in status:
        found["adaptra/replans"] = float(status["replans"])
    return found


def replica_scalars(reductions: Sequence[Any], shares: Any) -> dict[str, float]:
    """Return values for charts of what replicas do beside schedules, as this rank knows it.

    `reductions`: the job's PlannedCollectives. `shares`: this rank's Shares; None without.
    """
    found: dict[str, float] = {}
    for reduction in reductions:
        found |= {f"adaptra/{name}": value for name, value in reduction.scalars().items()}
    if shares is not None:
        for replica, count in enumerate(shares.plan.counts):
            found[f"adaptra/microbatches/replica-{replica}"] = float(count)
    return found
