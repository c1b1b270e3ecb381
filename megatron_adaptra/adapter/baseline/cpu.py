"""Stand-ins that let unmodified Megatron run on CPU and gloo.

Megatron asks `torch.cuda` for devices, streams, random states and places tensors with
`device="cuda"` or `device=torch.cuda.current_device()`. `install()` answers these on the CPU. It
runs only where CUDA is absent, has to run before anything imports megatron, and is never loaded on
a machine with a GPU.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like",
    "linspace", "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like",
    "randperm", "tensor", "zeros", "zeros_like",
)  # fmt: skip
_installed = False


def install() -> None:
    """Idempotent. Raises RuntimeError where there is CUDA, or where megatron came first."""
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("the CPU stand-ins are for machines without CUDA; this one has it")
    if "megatron.core" in sys.modules:
        raise RuntimeError("install the CPU stand-ins before anything imports megatron")
    _installed = True
    importlib.import_module("torch._dynamo")  # inspects torch when Adam first loads it: do it now

    torch.set_num_threads(1)
    # With one generator for both, "the CPU's state changed within a GPU context" is no news.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    _stand_in_cuda()
    _stand_in_tensors()
    _stand_in_modules()


class _Stream:
    """All streams are the one order of a CPU."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class _Generators:
    """`default_generators[i]`, for any index: there is one generator."""

    def __getitem__(self, _: Any) -> torch.Generator:
        return torch.default_generator


def _stand_in_cuda() -> None:
    properties = types.SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=0, multi_processor_count=1
    )

    def nothing(*_: Any, **__: Any) -> None: ...

    def zero(*_: Any, **__: Any) -> int:
        return 0

    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: _CPU,
        "set_device": nothing,
        "synchronize": nothing,
        "empty_cache": nothing,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *_: (8, 0),
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: "cpu",
        "memory_allocated": zero,
        "max_memory_allocated": zero,
        "memory_reserved": zero,
        "max_memory_reserved": zero,
        "reset_peak_memory_stats": nothing,
        "memory_stats": lambda *_: {},
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda _=None: _Stream(),
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": nothing,  # torch.manual_seed calls it
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "_lazy_call": lambda call, **_: call(),
        "_lazy_init": nothing,
        "default_generators": _Generators(),
    }
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = stand_ins["get_rng_state"]
    torch.cuda.random.set_rng_state = stand_ins["set_rng_state"]
    torch.compile = _identity
    if hasattr(torch, "accelerator"):
        torch.accelerator.is_available = lambda: False
        torch.accelerator.current_accelerator = nothing


def _identity(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _identity


def _on_cpu(device: Any) -> Any:
    """`cuda`, `cuda:0` and plain indices mean the CPU here."""
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    if isinstance(device, (str, torch.device)) and str(device).startswith("cuda"):
        return _CPU
    return device


def _stand_in_tensors() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name)))

    to, kind = torch.Tensor.to, torch.Tensor.type

    def tensor_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if args and not isinstance(args[0], (torch.Tensor, torch.dtype)):
            args = (_on_cpu(args[0]), *args[1:])
        return to(self, *args, **kwargs)

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:  # a cast: torch.cuda.FloatTensor means torch.FloatTensor
            wanted = args[0] if args else kwargs["dtype"]
            name = str(wanted).replace("torch.cuda.", "torch.")
            return kind(self, name if isinstance(wanted, str) else wanted)
        # Megatron's optimizer distinguishes precisions by this string.
        return kind(self).replace("torch.", "torch.cuda.", 1)

    def same(self: Any, *_: Any, **__: Any) -> Any:
        return self

    torch.Tensor.to = tensor_to
    torch.Tensor.type = tensor_type
    torch.Tensor.cuda = same
    torch.Tensor.pin_memory = same
    torch.Tensor.record_stream = lambda *_: None
    torch.Tensor.is_cuda = property(lambda _: True)
    torch.nn.Module.cuda = same


def _factory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return on_cpu


def _stand_in_modules() -> None:
    """Megatron 0.14 to 0.16 asks nvcc for its version when it loads its fused kernels."""
    kernels = types.ModuleType("megatron.legacy.fused_kernels")
    vars(kernels)["load"] = lambda *_: None
    sys.modules.setdefault("megatron.legacy.fused_kernels", kernels)
