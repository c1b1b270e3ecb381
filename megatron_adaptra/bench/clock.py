"""One clock for all ranks: they are on one machine, also in a laboratory."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron_adaptra.bench.options import Options

_PAUSE = 1e-3  # seconds until all ranks start, beside what a word takes to all of them


def start_together(options: Options) -> float:
    """Wait for the moment at which all ranks start; that moment, also on a rank that is late."""
    delay = max((rule.delay for rule in options.rules), default=0.0)
    # gloo tells all of them in so many steps, each of which crosses the link there and back.
    begin = latest(time.monotonic() + _PAUSE + 4 * options.ranks * delay)
    time.sleep(max(0.0, begin - time.monotonic()))
    return begin


def latest(moment: float) -> float:
    """The latest `moment` of all ranks, in seconds of the monotonic clock."""
    each = torch.tensor([moment], dtype=torch.float64)
    dist.all_reduce(each, dist.ReduceOp.MAX)
    return float(each)
