"""Two lines in a user's own script; then off again, and the functions are Megatron's own."""

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import pipeline_parallel  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402

import megatron_adaptra  # noqa: E402
from megatron_adaptra.adapter.baseline import gpt  # noqa: E402

dist.init_process_group("gloo")
gpt.initialize(gpt.GPTShape(stages=2), timeout=60)
before = schedules.get_forward_backward_func
assert pipeline_parallel.get_forward_backward_func is before
active = megatron_adaptra.activate()
ours = schedules.get_forward_backward_func
assert ours is not before
assert pipeline_parallel.get_forward_backward_func is ours
assert ours() is not before()
with pytest.raises(RuntimeError, match="already"):
    megatron_adaptra.activate()
active.undo()
assert schedules.get_forward_backward_func is before
assert pipeline_parallel.get_forward_backward_func is before
megatron_adaptra.activate().undo()
dist.barrier()
print("good", flush=True)
dist.destroy_process_group()
