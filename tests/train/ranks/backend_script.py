"""activate() where the pipeline's messages go by another backend than gloo: nothing is patched.

torch's own backend "fake" says that every operation is over at once: one process suffices.
"""

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import megatron_adaptra  # noqa: E402
from megatron_adaptra.base.errors import UnsupportedBackend  # noqa: E402

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mpu.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
before = schedules.get_forward_backward_func, dist.all_reduce
with pytest.raises(UnsupportedBackend, match="messages go by fake; gloo and nccl are supported"):
    megatron_adaptra.activate()
assert (schedules.get_forward_backward_func, dist.all_reduce) == before
print("good", flush=True)
dist.destroy_process_group()
