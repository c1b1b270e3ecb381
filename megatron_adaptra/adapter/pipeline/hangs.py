"""A rank's watch for hangs, in front of all limits that would end the training."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping

import torch.distributed as dist

from megatron_adaptra.adapter.pipeline.wiring import RankContext
from megatron_adaptra.execute.hang_watch import HangWatch, in_front
from megatron_adaptra.transport.connect import torch_waits

_FT = "megatron.training.ft_integration"  # imported where Megatron was started for ft_launcher


def watch_hangs(context: RankContext) -> HangWatch | None:
    """Start this rank's watch, which rank 0 announces with all limits; None where it is off."""
    dog = context.watchdog
    limits = {"--adaptra-timeout": dog.late, "torch's limit": torch_waits(), **_launchers()}
    seconds, line = in_front(context.config.hang_timeout, limits)
    context.say(line)
    if not seconds:
        return None
    behind = context.device.behind
    return HangWatch(dog, dist.get_rank(), dist.get_world_size(), seconds, behind)


def _launchers() -> Mapping[str, float]:
    """Return ft_launcher's limits on a training step, by name; none without it."""
    found: dict[str, float] = {}
    with contextlib.suppress(Exception):  # its classes differ between releases
        limits = sys.modules[_FT].get_rank_monitor_client().section_timeouts
        given = {"step": limits.section.get("step"), "out of sections": limits.out_of_section}
        found = {f"ft_launcher's {name}": float(limit) for name, limit in given.items() if limit}
    return found
