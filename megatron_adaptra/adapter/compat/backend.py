"""Where the pipeline's messages are, and whether we can carry them there."""

from __future__ import annotations

from megatron_adaptra.errors import UnsupportedBackend
from megatron_adaptra.telemetry.clock import HOST as HOST_CLOCK
from megatron_adaptra.telemetry.clock import Clock

HOST = "gloo"


def messages_on_device() -> bool:
    """Whether they are in a GPU's memory, and not in the host's; Megatron's groups exist.

    Raises UnsupportedBackend where they go by a backend that we know nothing of, or are on a GPU
    that we cannot use.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    backend: str = dist.get_backend(mpu.get_pipeline_model_parallel_group())
    if backend != HOST:
        raise UnsupportedBackend(
            f"the pipeline's messages go by {backend}, and only gloo is supported: on GPUs the "
            "plugin does nothing yet"
        )
    return False


def device_clock() -> Clock:
    """Of the device that runs this rank's ops."""
    return HOST_CLOCK
