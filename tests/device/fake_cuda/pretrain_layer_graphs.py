"""The training program of tests, layers as CUDA graphs; prints how what they put out is sent."""

import functools
import runpy
import sys
from pathlib import Path

from megatron.training import training

sys.path.insert(1, str(Path(__file__).resolve().parents[3] / "scripts"))

from gpu_check import kept_outputs

step = training.train_step


@functools.wraps(step)
def train_step(*args, **kwargs):
    result = step(*args, **kwargs)
    from megatron_adaptra.adapter.entry.plugin import PLUGIN

    session = PLUGIN.session
    for transport in session.run.wiring.pipelines:
        print(f"stage {session.stage}, cloned before it is sent: {transport.clones}", flush=True)
    return result


kept_outputs.install()
training.train_step = train_step
program = Path(__file__).parents[2] / "train" / "ranks" / "pretrain_gpt_small.py"
sys.path.insert(0, str(program.parent))
runpy.run_path(str(program), run_name="__main__")
