"""One rank of gpu_check.py: `equality FILE FOLDER`, or `overhead STAGES PAIRS FOLDER`.

Prints one JSON line per case, or one with all results, from rank 0. All ranks share GPU 0, and all
groups are gloo's; without CUDA, Megatron runs on CPU stand-ins.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import sub
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    from megatron_adaptra.adapter.baseline import cpu

    cpu.install()

import torch.distributed as dist  # noqa: E402
from host_staged import host_staged  # noqa: E402

WARM = 3  # iterations per arm that do not count
WEIGHED = (("1f1b", False), ("1f1b", True), ("zb-h1", False))  # policy, recompute


def deterministic() -> None:
    """The same bits every time, on a GPU too; the rest is CUBLAS_WORKSPACE_CONFIG.

    Where an operation has no deterministic kernel torch warns. New tensors stay unfilled: that
    changes no result, and would cost a kernel each.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


class OnDevice:
    """A dataset whose samples are where the model is."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self._dataset[index]
        return {name: torch.as_tensor(value, device="cuda") for name, value in sample.items()}


@contextlib.contextmanager
def data_on_device() -> Iterator[None]:
    from megatron_adaptra.adapter.baseline import gpt
    from megatron_adaptra.adapter.compat.patch_attr import patch_attr

    build = gpt.build_dataset
    back = patch_attr(gpt, "build_dataset", lambda *args: OnDevice(build(*args)))
    try:
        yield
    finally:
        back()


def equality(cases: str, folder: str) -> None:
    """The script of tests/adapter/test_schedules.py, as it is."""
    kernel = "fused_weight_gradient_mlp_cuda"  # has to be there before Megatron is imported
    if importlib.util.find_spec(kernel):
        importlib.import_module(kernel)
    else:
        importlib.import_module("fused_kernel").install()
    script = ROOT / "tests/adapter/schedules_script.py"
    sys.argv = [str(script), cases, folder]
    with host_staged(everything=not ON_GPU), data_on_device():
        runpy.run_path(str(script), run_name="__main__")


_Seconds = tuple[float, float]  # of wall clock, and of CPU in all threads of the process


def _turns(everyone: list[Any], name: str) -> tuple[list[float], list[float]]:
    """Per turn: seconds until the last rank was done, and of CPU, the mean of the ranks."""
    turns = list(zip(*(rank[name][1] for rank in everyone), strict=True))
    wall = [max(rank[0] for rank in turn) for turn in turns]
    return wall, [mean(rank[1] for rank in turn) for turn in turns]


class Overhead:
    """Arms of one training each, in turns; what counts is their forwards and backwards."""

    def __init__(self, stages: int, pairs: int, folder: Path) -> None:
        from megatron_adaptra.adapter.baseline import gpt

        self.gpt, self.pairs = gpt, pairs
        self.shape = gpt.GPTShape(stages=stages, layers=stages, dropout=0.0)
        if dist.get_rank() == 0:
            gpt.write_dataset(None, folder / "data", limit=200_000)
        dist.barrier()
        gpt.initialize(self.shape, timeout=60)
        samples = (WARM + pairs) * self.shape.microbatches
        self.dataset = gpt.build_dataset(folder / "data" / "text", self.shape, samples)
        self.stock = gpt.forward_backward_function()
        self.closing: list[Callable[[], None]] = []

    def run(self) -> list[dict[str, Any]]:
        functions = self.one_stage() if self.shape.stages == 1 else self.pipeline()
        arms = {name: self.gpt.Arm.build(self.shape, self.dataset) for name in functions}
        seconds: dict[str, list[_Seconds]] = {name: [] for name in functions}
        for turn in range(WARM + self.pairs):
            for name in functions if turn % 2 == 0 else reversed(functions):
                seconds[name].append(self.iteration(arms[name], functions[name]))
        for close in self.closing:
            close()
        mine = {name: (arm.digest(), seconds[name][WARM:]) for name, arm in arms.items()}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        first = next(iter(functions))
        return [self.row(name, first, everyone) for name in functions]

    def iteration(self, arm: Any, function: Any) -> _Seconds:
        arm.begin()
        dist.barrier()
        torch.cuda.synchronize()
        begin, cpu = time.perf_counter(), time.process_time()
        arm.forward_backward(function)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin, time.process_time() - cpu
        arm.optimizer.step()
        arm.end()
        return seconds

    def row(self, name: str, first: str, everyone: list[Any]) -> dict[str, Any]:
        """Against the first arm, turn by turn."""
        wall, cpu = _turns(everyone, name)
        stock_wall, stock_cpu = _turns(everyone, first)
        scale = 1e6 / (2 * self.shape.microbatches)
        return {
            "arm": name,
            "iteration_ms": 1e3 * median(wall),
            "ratio": median(a / b for a, b in zip(wall, stock_wall, strict=True)),
            "us_per_op": scale * median(map(sub, wall, stock_wall)),
            "cpu_us_per_op": scale * median(map(sub, cpu, stock_cpu)),
            "identical": all(rank[name][0] == rank[first][0] for rank in everyone),
        }

    def one_stage(self) -> dict[str, Any]:
        """Megatron's loop without a pipeline, and ours over the same ops, whole and in halves."""
        from megatron_adaptra.adapter.compat.schedule_args import (
            default_groups,
            message_of,
            models_of,
        )
        from megatron_adaptra.adapter.pipeline.executor_stage import MegatronStage
        from megatron_adaptra.adapter.pipeline.split import SplitBackward
        from megatron_adaptra.ir.schedule import parse_line
        from megatron_adaptra.runtime.guard import Guard
        from megatron_adaptra.runtime.mailbox import Mailbox
        from megatron_adaptra.runtime.watchdog import Watchdog
        from megatron_adaptra.telemetry.probe import Probe
        from megatron_adaptra.transport.gloo import GlooTransport

        probe, nobody, guard = Probe(0), GlooTransport({}, {}), Guard()
        mailbox = Mailbox(0, 1, nobody, probe, Watchdog(0, [0]), 60.0)
        splits: list[SplitBackward] = []

        def run(words: str, **arguments: Any) -> Any:
            count = arguments["num_microbatches"]
            line = parse_line(f"{kind}{i}" for i in range(count) for kind in words)
            halves = "W" in words
            if halves and not splits:
                splits.extend(SplitBackward(model) for model in models_of(arguments))
            probe.begin(0)
            mailbox.begin(0, message_of(arguments))
            groups = default_groups()
            given = splits if halves else ()
            return MegatronStage(line, mailbox, arguments, groups, guard, given).run()

        return {
            "Megatron, without pipelining": self.stock,
            "executor, F0 B0 F1 B1": partial(run, "FB"),
            "executor, F0 I0 W0 F1 I1 W1": partial(run, "FIW"),
        }

    def pipeline(self) -> dict[str, Any]:
        return {
            "Megatron's 1F1B": self.stock,
            "native, 1f1b": self.session("native", "1f1b")[1],
            "executor, 1f1b": self.session("executor", "1f1b")[1],
            "executor, zb-h1": self.session("executor", "zb-h1")[1],
        }

    def session(self, engine: str, policy: str, recompute: bool = False) -> tuple[Any, Any]:
        """What `activate` would put in place: several of them, to be used in turns."""
        from megatron_adaptra.adapter.compat.profiles import profile
        from megatron_adaptra.adapter.pipeline.session import Session
        from megatron_adaptra.config import AdaptraConfig

        config = AdaptraConfig(
            engine=engine, policy=policy, recompute=recompute, small_collectives="off", timeout=60.0
        )
        session = Session(config, profile())
        self.closing.append(session.close)
        return session, lambda **arguments: session.forward_backward(self.stock, arguments)

    def memory(self) -> list[dict[str, Any]]:
        """Peak bytes of activations per stage, measured and predicted: microbatches in flight times
        what a microbatch of whole activations takes."""
        self.closing, rows, unit = [], [], 0
        for policy, recompute in WEIGHED:
            session, function = self.session("executor", policy, recompute)
            session.keep_records = range(WARM)
            arm = self.gpt.Arm.build(self.shape, self.dataset)
            with weighed_forwards() as weights:
                for _ in range(WARM):
                    self.iteration(arm, function)
            counted = [r.memory for r in session.records[1:] if r.memory and r.memory.peak_bytes]
            # Whole activations are weighed where nothing is recomputed.
            unit = unit or max(counted[-1].per_microbatch, *weights)
            mine = counted[-1].peak, unit, counted[-1].peak_bytes
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
            rows += [
                {
                    "plan": f"{policy}{', recompute' if recompute else ''}, stage {stage}",
                    "in_flight": peak,
                    "predicted": round(peak * size),
                    "measured": measured,
                }
                for stage, (peak, size, measured) in enumerate(everyone)
            ]
            session.close()
        return rows


@contextlib.contextmanager
def weighed_forwards() -> Iterator[list[int]]:
    """By how many bytes each forward has let the allocator grow; zeros on a CPU, where the
    executor counts what autograd has saved."""
    from megatron_adaptra.adapter.compat.patch_attr import patch_attr
    from megatron_adaptra.adapter.pipeline.executor_stage import MegatronStage

    weights, original = [0], MegatronStage.forward

    def forward(stage: Any, op: Any) -> None:
        before = torch.cuda.memory_allocated()
        original(stage, op)
        weights.append(torch.cuda.memory_allocated() - before)

    back = patch_attr(MegatronStage, "forward", forward)
    try:
        yield weights
    finally:
        back()


def overhead(stages: str, pairs: str, folder: str) -> None:
    # Without a GPU, Megatron's own messages stay as fast as they are.
    with host_staged(), data_on_device():
        dist.init_process_group("gloo")
        bench = Overhead(int(stages), int(pairs), Path(folder))
        found = {"overhead": bench.run(), "memory": bench.memory() if int(stages) > 1 else []}
        if dist.get_rank() == 0:
            print("FOUND " + json.dumps(found), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    deterministic()
    {"equality": equality, "overhead": overhead}[sys.argv[1]](*sys.argv[2:])
