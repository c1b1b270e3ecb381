"""The memory that the pipeline's messages are in, of host or GPU, and access to that GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_adaptra.base.errors import UnsupportedBackend
from megatron_adaptra.device.base import Device
from megatron_adaptra.device.cuda import device_of

HOST, DEVICE = "gloo", "nccl"


def messages_on_gpus() -> bool:
    """Return whether the pipeline's messages are in GPUs' memory, once Megatron's groups exist.

    Raises UnsupportedBackend where they go by another backend than gloo and NCCL.
    """
    backend: str = dist.get_backend(mpu.get_pipeline_model_parallel_group())
    if backend not in (HOST, DEVICE):
        raise UnsupportedBackend(
            f"the pipeline's messages go by {backend}; {HOST} and {DEVICE} are supported"
        )
    return backend == DEVICE


def open_gpu() -> Device:
    """Open the GPU of this rank. Raises UnsupportedBackend where it is out of reach."""
    try:
        return device_of(torch.device(torch.cuda.current_device()))
    except Exception as error:  # whatever it is, Megatron can go on as stock
        raise UnsupportedBackend(f"messages on this GPU are out of reach: {error}") from error
