"""Our additions to what people see of a training: Megatron's log line, TensorBoard and W&B."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from megatron_adaptra.adapter.compat.patches import patch
from megatron_adaptra.adapter.entry.activate import Activation
from megatron_adaptra.adapter.pipeline import status
from megatron_adaptra.adapter.pipeline.session import Session

_LOG_LINE = "elapsed time per iteration"  # in Megatron's own line, in every release


def lengthen_line(session: Session, stack: contextlib.ExitStack) -> None:
    """Add the plan of `session` to the end of Megatron's log line, until `stack` is left."""
    from megatron.training import training

    original, text = training.print_rank_last, f" adaptra: {status.summary(session.run)} |"

    def print_rank_last(message: Any) -> None:
        original(f"{message}{text}" if _LOG_LINE in str(message) else message)

    stack.enter_context(patch("log-line", print_rank_last=print_rank_last))


def write_scalars(activation: Activation, training_log: Any, args: Any, kwargs: Any) -> None:
    """Write our scalars beside Megatron's; `args`, `kwargs`: of a call of its `training_log`."""
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

    iteration = inspect.signature(training_log).bind(*args, **kwargs).arguments["iteration"]
    scalars = status.scalars(activation.session.run)
    scalars |= status.replica_scalars(activation.reductions, activation.shares)
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is None or iteration % get_args().tensorboard_log_interval:
        return
    for name, value in scalars.items():
        tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(scalars, iteration)
