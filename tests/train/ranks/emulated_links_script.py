"""One of two ranks of test_emulated_sends.py: Megatron's own schedules over an emulated link.

Trains each case with and without the emulation, and prints what rank 0 found, a JSON line each.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

from megatron.core import parallel_state as mpu  # noqa: E402
from rank_of_job import begin, of_all_ranks, show  # noqa: E402

from megatron_adaptra.adapter.baseline import gpt  # noqa: E402
from megatron_adaptra.adapter.compat.profiles import profile  # noqa: E402
from megatron_adaptra.adapter.entry.activate import activate  # noqa: E402
from megatron_adaptra.config import AdaptraConfig  # noqa: E402

ITERATIONS, SLOW, DELAY = 4, 2, 0.2  # slow from iteration SLOW on
CASES = {"virtual stages, engine stock": ("stock", 2), "not ours, engine native": ("native", 1)}


def train(shape: gpt.GPTShape, prefix: Path, ours: bool) -> tuple[list[str], list[float]]:
    """Losses and parameters, bit for bit, and seconds by iteration."""
    samples = ITERATIONS * shape.microbatches
    arm = gpt.Arm.build(shape, gpt.build_dataset(prefix, shape, samples))
    arm.config.variable_seq_lengths = ours and shape.chunks == 1  # left to Megatron
    losses, seconds = [], []
    for _ in range(ITERATIONS):
        arm.begin()
        since = time.monotonic()
        found = arm.forward_backward(gpt.forward_backward_function())
        seconds.append(time.monotonic() - since)
        losses += [loss.item().hex() for loss in found]
        arm.optimizer.step()
        arm.end()
    return [*losses, arm.digest()], seconds


prefix = begin(Path(sys.argv[1]))
for case, (engine, chunks) in CASES.items():
    shape = gpt.GPTShape(
        stages=2, microbatches=2, chunks=chunks, hidden=32, seq_length=32,
        overlapped=chunks > 1 and profile().waits,
    )  # fmt: skip
    gpt.initialize(shape, timeout=60)
    stock, _ = train(shape, prefix, False)
    rules = [f"0-1:{1000 * DELAY:g}ms@{SLOW}.."]
    activation = activate(AdaptraConfig(engine=engine, emulate_link=rules))
    bits, seconds = train(shape, prefix, True)
    activation.undo()
    # A microbatch goes through all chunks and back.
    least = 2 * (2 * chunks - 1) * DELAY
    same = of_all_ranks(bits == stock)
    show("FOUND", {"case": case, "same": same, "least": least, "slow": seconds[SLOW:]})
    mpu.destroy_model_parallel()
