"""One rank of a training for parts hide, memory and equality: Megatron's own program, watched.

Runs the training script of the tests. A link is slow for Megatron's messages from one iteration to
another: over NCCL, each begins on its stream so much later; over gloo, which takes its place where
ranks share a GPU, the copy that is sent waits at the host. Writes what was seen to rankN.json.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import runpy
import sys
import time
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

GIVEN = json.loads(os.environ["ADAPTRA_GPU_CHECK"])
# Several ranks may share a GPU; Megatron takes the one that this names.
os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % max(1, GIVEN["gpus"]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fakes.slow_net.network import SlowNetwork  # noqa: E402
from gpu_check import kept_outputs, shared_nccl, without_numerics  # noqa: E402
from gpu_check.deterministic import deterministic  # noqa: E402
from gpu_check.host_staged import host_staged  # noqa: E402

KERNEL_CYCLES = 1_000_000
CALLS = ("batch_isend_irecv", "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
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
    """A network of NCCL whose links are slow while it is `on`, by shared_nccl.Network."""

    def __init__(self, folder: str, seconds: float) -> None:
        self._network, self._seconds = SlowNetwork(Path(folder)), seconds

    def switch(self, on: bool) -> None:
        """Begin or end, before an iteration."""
        if dist.get_rank():
            return  # the ranks share the links
        for a, b in GIVEN["links"]:
            for source, target in ((a, b), (b, a)):
                self._network.slow(
                    shared_nccl.host_of(source), shared_nccl.host_of(target), on * self._seconds
                )


class HeldBack:
    """The same over gloo, by the emulator of stock's arms."""

    def __init__(self, rule: str) -> None:
        self._rule, self._stack = rule, contextlib.ExitStack()

    def switch(self, on: bool) -> None:
        """Begin or end, before an iteration."""
        from megatron.core import parallel_state as mpu

        from megatron_adaptra.adapter.baseline.stock import EmulatedSends
        from megatron_adaptra.emulate.links import LinkEmulator
        from megatron_adaptra.emulate.rules import parse_rules

        self._stack.close()
        if on:
            group = mpu.get_pipeline_model_parallel_group()
            emulator = LinkEmulator(group.rank(), parse_rules(self._rule, GIVEN["stages"]))
            sends = EmulatedSends(emulator, dist.get_process_group_ranks(group))
            self._stack.callback(sends.close)
            self._stack.enter_context(sends.slow(0))


class Calls:
    """A list of Megatron's calls of torch.distributed: which, with whom, of how many values."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        for name in CALLS:
            setattr(dist, name, self._around(name, getattr(dist, name)))

    def _around(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*words: Any, **named: Any) -> Any:
            given = words[0] if words else next(iter(named.values()), None)
            ops = given if isinstance(given, list) else []
            each = [(op.op.__name__, op.peer, op.tensor.numel()) for op in ops]
            self._seen.append([name, each or getattr(given, "numel", int)()])
            return function(*words, **named)

        return call

    def take(self) -> str:
        """Return a digest of the calls since the last time, and their number."""
        text, count = json.dumps(self._seen), len(self._seen)
        self._seen = []
        return f"{count} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Watch:
    """Around each iteration: its time, memory, the plan, pinned memory; at the end parameters."""

    def __init__(self, slow: Any, calls: Calls | None = None) -> None:
        self.slow, self.calls, self.count, self.on = slow, calls, 0, False
        self.rows: list[dict[str, Any]] = []

    def around(self, step: Any) -> Any:
        @functools.wraps(step)
        def train_step(*words: Any, **named: Any) -> Any:
            on = GIVEN["begin"] <= self.count < GIVEN["end"]
            if on != self.on:
                self.on = on
                self.slow.switch(on)
            session = self.session()
            ours = session is not None and session.run is not None and not session.run.stock
            in_flight = planned(session)  # of this iteration: after it, the next one's is known
            begin = time.monotonic()
            result = step(*words, **named)
            row = {"ms": 1e3 * (time.monotonic() - begin), "ours": ours, "in_flight": in_flight}
            row |= memory(session)
            row["calls"] = self.calls.take() if self.calls is not None else ""
            if GIVEN["spoil"] and session is not None:
                torch.cuda.reset_peak_memory_stats()  # as a planted fault
            self.rows.append(row)
            self.count += 1
            if self.count == GIVEN["iterations"]:
                self.write(words[2] if len(words) > 2 else named["model"], session)
            return result

        return train_step

    def session(self) -> Any:
        if "megatron_adaptra.adapter.entry.plugin" not in sys.modules:
            return None
        from megatron_adaptra.adapter.entry.plugin import PLUGIN

        if (found := PLUGIN.session) is not None:
            found.reports.keep_records = range(1 << 30)
        return found

    def write(self, models: list[Any], session: Any) -> None:
        sha = hashlib.sha256()
        for model in models:
            for name, parameter in sorted(model.named_parameters()):
                flat = parameter.detach().contiguous().view(-1).view(torch.uint8)
                sha.update(name.encode() + flat.cpu().numpy().tobytes())
        found = {"rows": self.rows, "digest": sha.hexdigest(), "records": []}
        if session is not None:
            found["records"] = [
                {"iteration": r.iteration, "stock": r.stock, "unusable": r.unusable,
                 "starved": r.starved if r.known else None,
                 "memory": None if r.memory is None else asdict(r.memory)}
                for r in session.reports.records
            ]  # fmt: skip
        path = Path(GIVEN["folder"]) / f"rank{os.environ['RANK']}.json"
        path.write_text(json.dumps(found))


def memory(session: Any) -> dict[str, Any]:
    """Of torch's allocator, as Megatron reports it, and of the host."""
    found = {"allocated": torch.cuda.memory_allocated(), "most": torch.cuda.max_memory_allocated(),
             "reserved": torch.cuda.max_memory_reserved()}  # fmt: skip
    run = None if session is None else session.run
    if run is not None and (staging := run.wiring.staging) is not None:
        host = staging.memory()
        found["clones"] = all(transport.clones for transport in run.wiring.pipelines)
        found |= {"held": host.held, "used": host.used, "pinned_peak": host.peak}
    return found


def planned(session: Any) -> float | None:
    """Microbatches in flight at most, of the plan in force; None before there is one."""
    if session is None or session.run is None:
        return None
    return float(session.run.controller.ballot.schedule.peak_in_flight()[session.stage])


def on_a_gpu_all_the_same() -> None:
    """Have gloo's messages, which are in the host's memory, taken for those of a GPU.

    So the plugin measures, plans and switches as under NCCL, though ranks share a GPU.
    """
    from megatron_adaptra.adapter.compat.patch_attr import find, patch_attr

    patch_attr(*find("megatron_adaptra.adapter.entry.activate:messages_on_gpus"), lambda: True)


def uncopied() -> None:
    """As a planted fault, what a graph has put out is sent from where the next replay writes."""
    from megatron_adaptra.adapter.compat.patch_attr import find, patch_attr

    patch_attr(*find("megatron_adaptra.adapter.pipeline.wiring:has_graphs"), lambda config: False)


def main() -> None:
    deterministic()
    if GIVEN["graphs"]:
        kept_outputs.install()
    if GIVEN["uncopied"]:
        uncopied()
    with contextlib.ExitStack() as stack:
        if GIVEN["network"]:
            shared_nccl.join(int(os.environ["RANK"]))
            slow: Any = OverNetwork(GIVEN["network"], GIVEN["delay"])
        elif GIVEN["nccl"]:
            slow = Late(GIVEN["delay"])
        else:
            stack.enter_context(host_staged())
            slow = HeldBack(f"0-1:{1e3 * GIVEN['delay']:g}ms")
            if "--adaptra" in sys.argv:
                on_a_gpu_all_the_same()
        calls = Calls()  # before Megatron binds some of these functions by name
        if GIVEN["fake"]:
            without_numerics.allow()
        from megatron.training import training

        watch = Watch(slow, calls)
        training.train_step = watch.around(training.train_step)
        script = Path(GIVEN["script"])
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
