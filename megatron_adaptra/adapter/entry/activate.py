"""Switching the plugin on in a running Megatron, and off again."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from megatron_adaptra.adapter.compat.profiles import profile, verify
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.errors import UnsupportedBackend

# Every module that binds the name; training.py imports it by name, so the core's is not enough.
BINDINGS = (
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.pipeline_parallel",
    "megatron.training.training",
)
_NAME = "get_forward_backward_func"


class Activation:
    """What `activate` did. `session` is this rank's plugin; `undo` puts everything back."""

    def __init__(self, session: Any, originals: dict[ModuleType, Any]) -> None:
        self.session, self._originals = session, originals

    def undo(self) -> None:
        for module, function in self._originals.items():
            setattr(module, _NAME, function)
        self._originals = {}
        self.session.close()


def activate(config: AdaptraConfig | None = None) -> Activation:
    """Patch `get_forward_backward_func`; call it after Megatron's groups have been made.

    Raises UnsupportedMegatron or UnsupportedBackend before anything is patched, RuntimeError if it
    is active already.
    """
    row = profile()  # looks at the version before anything of Megatron is imported
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    verify(schedules, P2PCommunicator, row)
    if hasattr(schedules.get_forward_backward_func, "adaptra"):
        raise RuntimeError("megatron_adaptra is active already; undo() the first activation")
    _refuse_gpus()
    from megatron_adaptra.adapter.pipeline.session import Session

    session = Session(config or AdaptraConfig(), row)
    original = schedules.get_forward_backward_func

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        stock = original(*args, **kwargs)

        # Megatron fetches this once before its loop: it reads the plan in force at every call.
        @functools.wraps(stock)
        def forward_backward(**arguments: Any) -> Any:
            return session.forward_backward(stock, arguments)

        return forward_backward

    get_forward_backward_func.adaptra = True  # type: ignore[attr-defined]
    originals = {}
    for name in BINDINGS:
        module = sys.modules.get(name)
        if module is not None and getattr(module, _NAME, None) is original:
            originals[module] = original
            setattr(module, _NAME, get_forward_backward_func)
    return Activation(session, originals)


def _refuse_gpus() -> None:
    """There is no transport between GPUs yet: receives posted ahead hang NCCL."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    backend = dist.get_backend(mpu.get_pipeline_model_parallel_group())
    if backend != "gloo":
        raise UnsupportedBackend(
            f"the pipeline's messages go by {backend}, and only gloo is supported: on GPUs the "
            "plugin does nothing yet"
        )
