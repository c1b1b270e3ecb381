"""Slow links for messages of Megatron's own: over NCCL, NCCL's slow network, and gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fakes.slow_net.network import SlowNetwork
from gpu_check import shared_nccl

KERNEL_CYCLES = 1_000_000
STREAMS = 32  # messages that may be on their way at once, each with its delay from its own start


class Late:
    """A late network has messages between ranks 0 and 1 begin `seconds` late while it is `on`.

    Each message waits on a stream of its own, so that several take one delay, as over a link.
    """

    def __init__(self, seconds: float) -> None:
        self._on, self._seconds, self._each = False, seconds, 0.0
        self._batch = dist.batch_isend_irecv
        self._streams: Any = None
        dist.batch_isend_irecv = self.batch

    def batch(self, ops: list[Any]) -> Any:
        if not self._on or not {dist.get_rank(), *(op.peer for op in ops)} >= {0, 1}:
            return self._batch(ops)
        here, there = torch.cuda.current_stream(), next(self._streams)
        there.wait_stream(here)
        with torch.cuda.stream(there):
            for _ in range(round(self._seconds / self._each)):
                torch.cuda._sleep(KERNEL_CYCLES)
            works = self._batch(ops)
        for op in ops:
            op.tensor.record_stream(there)
        return works

    def switch(self, on: bool) -> None:
        """Begin or end, before an iteration."""
        if self._streams is None:
            self._prepare()
        self._on = on

    def _prepare(self) -> None:
        """Make streams, and time a kernel of theirs."""
        self._streams = cycle([torch.cuda.Stream() for _ in range(STREAMS)])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for count in (1, 32):
            begin.record()
            for _ in range(count):
                torch.cuda._sleep(KERNEL_CYCLES)
            end.record()
            end.synchronize()
        self._each = max(1e-6, begin.elapsed_time(end) / 1e3 / 32)


class OverNetwork:
    """A slow network of NCCL delays messages over some `links` by `seconds` while it is `on`."""

    def __init__(self, folder: str, links: Sequence[tuple[int, int]], seconds: float) -> None:
        self._network, self._links = SlowNetwork(Path(folder)), links
        self._seconds = seconds

    def switch(self, on: bool) -> None:
        """Begin or end, before an iteration."""
        if dist.get_rank():
            return  # the ranks share the links
        for a, b in self._links:
            for source, target in ((a, b), (b, a)):
                self._network.slow(
                    shared_nccl.host_of(source), shared_nccl.host_of(target), on * self._seconds
                )


class HeldBack:
    """An emulator holds back Megatron's sends over gloo by a `rule` for links, while it is `on`."""

    def __init__(self, rule: str, stages: int) -> None:
        self._rule, self._stages, self._stack = rule, stages, contextlib.ExitStack()

    def switch(self, on: bool) -> None:
        """Begin or end, before an iteration."""
        from megatron.core import parallel_state as mpu

        from megatron_adaptra.adapter.baseline.stock import EmulatedSends
        from megatron_adaptra.emulate.links import LinkEmulator
        from megatron_adaptra.emulate.rules import parse_rules

        self._stack.close()
        if on:
            group = mpu.get_pipeline_model_parallel_group()
            emulator = LinkEmulator(group.rank(), parse_rules(self._rule, self._stages))
            sends = EmulatedSends(emulator, dist.get_process_group_ranks(group))
            self._stack.callback(sends.close)
            self._stack.enter_context(sends.slow(0))
