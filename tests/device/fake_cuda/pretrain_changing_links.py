"""The training program of tests, while links of NCCL get slow and heal at given iterations.

FAKE_LINKS_CHANGE holds the file that the fake NCCL reads, the rules to write into it, the
iterations (from 0) that begin and end slow times, and the rules of all others, or none:
"FILE|0-1 40;2-3 40|10,25,40,55|". FAKE_PROGRAM: another program, as pretrain_gpt.py of a checkout
of Megatron-LM.
"""

import functools
import os
import runpy
import sys
from pathlib import Path

from megatron.core.optimizer import optimizer
from megatron.training import training

path, rules, changes, otherwise = f"{os.environ['FAKE_LINKS_CHANGE']}|".split("|")[:4]
times = [int(text) for text in changes.split(",")]
step, count = training.train_step, 0


@functools.wraps(step)
def train_step(*args, **kwargs):
    global count
    if count in times and os.environ["RANK"] == "0":
        slow = times.index(count) % 2 == 0
        new = Path(f"{path}.new")
        new.write_text((rules if slow else otherwise).replace(";", "\n") + "\n")
        new.replace(path)
    count += 1
    return step(*args, **kwargs)


def never_complex(*args, **kwargs):
    """Kernels compute nothing, so a square is what memory held before, perhaps less than zero."""
    return abs(norm(*args, **kwargs))


norm, optimizer.get_grad_norm_fp32 = optimizer.get_grad_norm_fp32, never_complex
training.train_step = train_step
small = Path(__file__).parents[2] / "train" / "ranks" / "pretrain_gpt_small.py"
program = Path(os.environ.get("FAKE_PROGRAM", small))
sys.path.insert(0, str(program.parent))
runpy.run_path(str(program), run_name="__main__")
