"""One rank of test_slow_worker.py: 2 replicas of 2 stages, worker 1.0 and path 0.0-0.1 slow.

Trains under stock Megatron first, then under each engine with the emulation. What all ranks found
is printed by rank 0, one JSON line per engine.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from rank_of_job import begin, of_all_ranks, show  # noqa: E402

from megatron_adaptra.adapter.baseline import gpt  # noqa: E402
from megatron_adaptra.adapter.entry.activate import activate  # noqa: E402
from megatron_adaptra.adapter.pipeline.emulation import Emulation, emulated_links  # noqa: E402
from megatron_adaptra.config import AdaptraConfig  # noqa: E402
from megatron_adaptra.errors import BadInput  # noqa: E402
from megatron_adaptra.ir.op import Kind  # noqa: E402

ITERATIONS, SLOW = 6, 3  # worker and path are slow from iteration SLOW on
RULES = {
    "emulate_worker": [f"1.0:3x@{SLOW}.."], "emulate_link": [f"0.0-0.1:30ms@{SLOW}.."],
}  # fmt: skip
COMMON: dict[str, Any] = {**RULES, "min_gain": 1e9, "timeout": 60.0}
ENGINES = {
    "native": AdaptraConfig(engine="native", **COMMON),
    "executor": AdaptraConfig(engine="executor", policy="zb-h1", recompute=True, **COMMON),
    "stock": AdaptraConfig(engine="stock", **COMMON),
}
SHAPE = gpt.GPTShape(stages=2, microbatches=4, layers=2, hidden=128, seq_length=128)


def train(dataset: Any) -> list[str]:
    """The losses, and a digest of the parameters, bit for bit."""
    arm = gpt.Arm.build(SHAPE, dataset)
    function, losses = gpt.forward_backward_function(), []
    for _ in range(ITERATIONS):
        arm.begin()
        losses += [loss.item().hex() for loss in arm.forward_backward(function)]
        arm.optimizer.step()
        arm.end()
    return [*losses, arm.digest()]


def slowed(config: AdaptraConfig, dataset: Any) -> dict[str, Any]:
    """A training with the emulation: its bits, and what was measured of ops and messages."""
    activation = activate(config)
    session = activation.session
    session.keep_records = range(ITERATIONS)
    emulator, waits = session.context.worker_emulator, []
    asked = 0.0  # seconds of the timer for this op

    def sleep(seconds: float) -> None:
        nonlocal asked
        asked = seconds
        time.sleep(seconds)

    def wait(since: float, kind: Kind) -> None:
        nonlocal asked
        asked, computed, begun = 0.0, emulator.work() - since, time.monotonic()
        waited(since, kind)
        times, took = emulator.seconds(1.0, kind), time.monotonic() - begun
        waits.append((emulator.iteration, times, computed, took, asked))

    waited, emulator.wait, emulator._sleep = emulator.wait, wait, sleep
    try:
        bits = train(dataset)
    finally:
        activation.undo()
    replica = mpu.get_data_parallel_rank()
    return {
        "worker": f"{replica}.{session.stage}",
        "bits": bits,
        "waits": waits,
        "ops": [[o.op.kind.value, r.iteration, o.end - o.start, o.cpu]
                for r in session.records for o in r.ops],
        "delays": [[r.iteration, t.delay] for r in session.records for _, _, t in r.messages],
    }  # fmt: skip


def refusal_on_gpus() -> str:
    """What a rank whose ops are on a GPU says of a slow worker."""
    current, torch.cuda.current_device = torch.cuda.current_device, lambda: "cuda:0"
    try:
        activate(ENGINES["native"])
    except BadInput as error:
        return str(error)
    finally:
        torch.cuda.current_device = current
    return ""


def targets(together: bool) -> list[int]:
    """Whom this rank's messages get to late, as stages or, of all replicas, as workers."""
    rules = ["0.1-1.0:60s", "0.0-0.1:60s"]
    config, stage = AdaptraConfig(emulate_link=rules), mpu.get_pipeline_model_parallel_rank()
    links = emulated_links(config, stage, 2, together)
    assert links is not None
    return [target for target in range(4) if links.holds(target)]


def steady(*rules: str) -> bool:
    """Whether ops of this rank's worker keep their length, with these `rules`."""
    stage = mpu.get_pipeline_model_parallel_rank()
    emulator = Emulation.of_rank(AdaptraConfig(emulate_worker=list(rules)), stage, 2).worker
    assert emulator is not None
    lengths = [emulator.seconds(computed, Kind.F) + computed for computed in (1.0, 1.0, 2.0)]
    return lengths[0] == lengths[2]


def main() -> None:
    prefix = begin(Path(sys.argv[1]))
    gpt.initialize(SHAPE, timeout=60)
    dataset = gpt.build_dataset(prefix, SHAPE, 8 * ITERATIONS * SHAPE.microbatches)
    stock, refusal = train(dataset), refusal_on_gpus()
    for name, config in ENGINES.items():
        found = {"engine": name, "stock": stock, "refusal": refusal, **slowed(config, dataset)}
        workers = [f"{replica}.{stage}:10x" for replica in range(2) for stage in range(2)]
        found["steady"] = [steady(*workers), steady(*workers[1:])]
        found["targets"] = [targets(together=False), targets(together=True)]
        show("FOUND", of_all_ranks(found))
    dist.destroy_process_group()


main()
