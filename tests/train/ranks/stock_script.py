"""Megatron alone, as its documentation says: nothing of the plugin but the CPU stand-ins."""

import json
import sys
from pathlib import Path

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import torch.distributed as dist  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from megatron_adaptra.adapter.baseline import gpt  # noqa: E402

ITERATIONS = 9
data, out = Path(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo")
shape = gpt.GPTShape(stages=2, layers=2, hidden=32, seq_length=32, precision=sys.argv[3])
gpt.initialize(shape, timeout=60)
if dist.get_rank() == 0:
    gpt.write_dataset(None, data)
dist.barrier()
arm = gpt.Arm.build(shape, gpt.build_dataset(data / "text", shape, ITERATIONS * shape.microbatches))
losses = []
for _ in range(ITERATIONS):
    arm.begin()
    losses.append(gpt.mean_loss(arm.forward_backward(get_forward_backward_func())))
    arm.optimizer.step()
    arm.end()
if dist.get_rank() == 0:
    out.write_text(json.dumps(losses))
dist.barrier()
dist.destroy_process_group()
