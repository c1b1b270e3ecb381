"""Jobs that can share out an iteration between replicas, and the reasons why others cannot.

Reasons in Megatron's groups and its model are the same on all ranks (`apart`). The rest is seen in
the first iteration, which every job runs as stock (`FirstIteration`): its data, its losses, and
whether ops wait for other replicas, which may be at another microbatch under shares.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel

from megatron_adaptra.adapter.compat.features import has_graphs
from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs, config_of, models_of, only
from megatron_adaptra.adapter.pipeline import closed_groups
from megatron_adaptra.adapter.pipeline.counted_batches import CountedBatches, counted
from megatron_adaptra.adapter.pipeline.op_watch import OpWatch
from megatron_adaptra.adapter.shares.share_data import ShareData
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.ir.sync import MOST_PAIRS

# Fields of a model's config that scale losses beside `grad_scale_func`, each with the reason.
_REFUSED = {
    "moe_grad_scale_func": "a function of its own scales losses of experts",
    "mtp_grad_scale_func": "a function of its own scales losses of later tokens",
}


def apart(config: AdaptraConfig, arguments: ScheduleArgs) -> str:
    """Return why replicas run equally many microbatches, or ""; the same on all ranks.

    `arguments`: those of Megatron's schedule, before the first iteration.
    """
    if reason := too_many(arguments["num_microbatches"]):
        return reason
    if config.reroute != "off" and config.sync != "auto":
        return (
            f"--adaptra-reroute {config.reroute} moves microbatches itself; --adaptra-sync auto "
            "takes one or the other"
        )
    if mpu.get_data_parallel_world_size() == 1:
        return "there is one replica"
    if (mpu.get_virtual_pipeline_model_parallel_world_size() or 1) > 1:
        return "there are virtual stages"
    if mpu.get_expert_model_parallel_world_size() > 1:
        return "replicas share experts"
    models, theirs = models_of(arguments), config_of(arguments)
    if has_graphs(theirs):
        return "CUDA graphs were recorded for as many microbatches"
    for name, reason in _REFUSED.items():
        if getattr(theirs, name, None):
            return reason
    ties = closed_groups.configured(theirs, models)
    if why := closed_groups.beyond(closed_groups.own_ranks(), ties):
        return f"replicas meet inside ops: {why}"
    for model in models:
        if not isinstance(model, DistributedDataParallel):
            return f"gradients of a {type(model).__name__} may be reduced more than once"
    return ""


def too_many(microbatches: int) -> str:
    """Return why so many `microbatches` of each replica are not shared out, or an empty string."""
    total = microbatches * mpu.get_data_parallel_world_size()
    return (
        f"an iteration has {total}, at most {MOST_PAIRS} are shared out"
        if total > MOST_PAIRS
        else ""
    )


class FirstIteration:
    """A FirstIteration watches an iteration that runs as stock.

    `data`: this rank's. `per_token`: `--calculate-per-token-loss` is set.
    """

    def __init__(self, data: ShareData, per_token: bool) -> None:
        self._data, self._per_token = data, per_token
        self._met = ""
        self._batches: CountedBatches | None = None
        self._unread = self._losses = ""

    def around(self, arguments: ScheduleArgs) -> ScheduleArgs:
        """Return the same `arguments` of Megatron's schedule, with data and losses watched."""
        self._unread = self._data.why_not(only(arguments["data_iterator"]))
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
