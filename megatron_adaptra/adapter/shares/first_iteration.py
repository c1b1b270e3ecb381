"""A first iteration, which every job runs as stock, shows whether later ones can be shared out.

It shows data, losses, and whether ops wait for other replicas, which may be at another microbatch
under shares. Reasons that are known before are rows of `limits`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_adaptra.adapter.compat import closed_groups
from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs, only
from megatron_adaptra.adapter.pipeline.counted_batches import CountedBatches, counted
from megatron_adaptra.adapter.pipeline.home_data import unreadable
from megatron_adaptra.adapter.pipeline.op_watch import OpWatch


class FirstIteration:
    """A FirstIteration watches an iteration that runs as stock.

    `per_token`: `--calculate-per-token-loss` is set.
    """

    def __init__(self, per_token: bool) -> None:
        self._per_token = per_token
        self._met = ""
        self._batches: CountedBatches | None = None
        self._unread = self._losses = ""

    def around(self, arguments: ScheduleArgs) -> ScheduleArgs:
        """Return the same `arguments` of Megatron's schedule, with data and losses watched."""
        self._unread = unreadable(only(arguments["data_iterator"]))
        arguments, self._batches = counted(arguments)
        forward_step = arguments["forward_step_func"]

        @functools.wraps(forward_step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            output, loss = forward_step(*args, **kwargs)
            return output, self._seen(loss) if callable(loss) else loss

        return {**arguments, "forward_step_func": watched}

    @contextlib.contextmanager
    def ops(self, config: Any) -> Iterator[None]:
        """Watch ops, in a `with`, in the schedule of a model with this `config`."""
        own = closed_groups.at_my_stage()
        watch = OpWatch(own, own)
        with contextlib.closing(watch), watch.watching(config.finalize_model_grads_func):
            yield
        self._met = "" if watch.met is None else watch.met.why

    @property
    def reads(self) -> bool:
        """True where forwards of this rank have read batches."""
        return self._batches is not None and any(self._batches.reads)

    @property
    def reason(self) -> str:
        """The reason why this rank's iterations cannot be shared out, or an empty string."""
        unread = self._unread if self.reads else ""
        odd = "" if self._batches is None else self._batches.why_not()
        return self._met or odd or unread or self._losses

    def _seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a loss `function`, to look at its results."""

        @functools.wraps(function)
        def seen(*args: Any, **kwargs: Any) -> Any:
            outputs = function(*args, **kwargs)
            self._losses = self._losses or _unlike(outputs, self._per_token)
            return outputs

        return seen


def _unlike(outputs: Any, per_token: bool) -> str:
    """Describe what in a loss function's `outputs` cannot be added up over replicas, or ""."""
    if not isinstance(outputs, tuple) or len(outputs) not in (2, 3):
        return "a loss function returns no loss beside what it reports"
    if per_token and len(outputs) == 2:
        return "a loss function returns no number of tokens, with --calculate-per-token-loss"
    shown = outputs[-1]
    if not isinstance(shown, dict):
        return f"a loss function reports a {type(shown).__name__}, not losses by name"
    for name, value in shown.items():
        if not isinstance(value, torch.Tensor) or value.numel() != 2:
            return (
                f"a loss function reports {str(name)!r} as it is in one microbatch, not as a sum "
                "and a count, which add up over replicas"
            )
    return ""
