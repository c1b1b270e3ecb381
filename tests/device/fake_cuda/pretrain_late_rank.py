"""The training program of tests, one of whose ranks is slower than the others.

FAKE_LATE: the rank, by how many seconds, and from which iteration (from 0) on: "2:0.2:8". It waits
after its first forward, for which parameters may be gathered.
"""

import functools
import os
import runpy
import sys
import time
from pathlib import Path

from megatron.core.optimizer import optimizer
from megatron.training import training

rank, seconds, first = os.environ["FAKE_LATE"].split(":")
step, count = training.train_step, 0


@functools.wraps(step)
def train_step(forward_step, *args, **kwargs):
    global count
    count += 1
    waits = [float(seconds)] if os.environ["RANK"] == rank and count > int(first) else []

    @functools.wraps(forward_step)
    def forward(*args, **kwargs):
        result = forward_step(*args, **kwargs)
        time.sleep(waits.pop() if waits else 0.0)
        return result

    return step(forward, *args, **kwargs)


def never_complex(*args, **kwargs):
    """Kernels compute nothing, so a square is what memory held before, perhaps less than zero."""
    return abs(norm(*args, **kwargs))


norm, optimizer.get_grad_norm_fp32 = optimizer.get_grad_norm_fp32, never_complex
training.train_step = train_step
program = Path(__file__).parents[2] / "train" / "ranks" / "pretrain_gpt_small.py"
sys.path.insert(0, str(program.parent))
runpy.run_path(str(program), run_name="__main__")
