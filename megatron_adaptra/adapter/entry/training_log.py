"""What people see while Megatron trains: its log line, its TensorBoard and its W&B."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from megatron_adaptra.adapter.pipeline import status
from megatron_adaptra.adapter.pipeline.session import Session

_LOG_LINE = "elapsed time per iteration"  # in Megatron's own line, in every release


def training_log(session: Session, wrapped: Any, args: Any, kwargs: Any) -> Any:
    """Megatron's `training_log`, its line a little longer, and our scalars beside its own."""
    from megatron.training import training

    with _longer_line(training, f" adaptra: {status.summary(session.run)} |"), session.logging():
        result = wrapped(*args, **kwargs)
    iteration = inspect.signature(wrapped).bind(*args, **kwargs).arguments["iteration"]
    _write_scalars(status.scalars(session.run), iteration)
    return result


@contextlib.contextmanager
def _longer_line(module: Any, text: str) -> Iterator[None]:
    original = module.print_rank_last

    def print_rank_last(message: Any) -> None:
        original(f"{message}{text}" if _LOG_LINE in str(message) else message)

    module.print_rank_last = print_rank_last
    try:
        yield
    finally:
        module.print_rank_last = original


def _write_scalars(scalars: dict[str, float], iteration: int) -> None:
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is None or iteration % get_args().tensorboard_log_interval:
        return
    for name, value in scalars.items():
        tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(scalars, iteration)
