"""What Megatron-LM's unit tests need, besides the plugin's CPU stand-ins, where there is no GPU.

They ask for NCCL, for as many GPUs as ranks, for Transformer Engine and for test data from the
network. `install` answers all that on the CPU; it has to run before anything imports megatron.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed import distributed_c10d as c10d

from megatron_adaptra.adapter.baseline import cpu

_TIMEOUT = timedelta(seconds=120)  # of one message: a rank that waits in vain fails its test


def install(world: int) -> None:
    cpu.install()
    torch.cuda.device_count = lambda: world
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.amp.autocast_mode.autocast = torch.autocast = _autocast(torch.autocast)
    _gloo_for_nccl()
    _nothing_to_download()
    _no_transformer_engine()
    _nothing_to_set()
    _groups_end_with_their_names()


def _autocast(autocast: Any) -> Any:
    """Tensors on "cuda" are on the CPU here."""

    class OnCpu(autocast):  # type: ignore[misc]
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return OnCpu


def _gloo_for_nccl() -> None:
    make, barrier = c10d._new_process_group_helper, dist.barrier
    made: Counter[str] = Counter()

    @functools.wraps(make)
    def on_gloo(
        size: int, rank: int, ranks: Any, backend: Any, store: Any, name: Any, *args: Any, **kw: Any
    ) -> Any:
        # torch numbers its groups. Upstream's tests let pipelines make groups of their own side by
        # side, other ranks under one number. NCCL connects a group when it is first used; gloo
        # does at once, takes the other pipeline's addresses from the store, and stalls.
        members = "-".join(map(str, ranks))
        made[members] += 1
        kw["timeout"] = _TIMEOUT
        return make(size, rank, ranks, "gloo", store, f"{members}#{made[members]}", *args, **kw)

    @functools.wraps(barrier)
    def barrier_without_devices(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        return barrier(*args, **kwargs)

    c10d._new_process_group_helper = on_gloo
    c10d.barrier = dist.barrier = barrier_without_devices


def _nothing_to_download() -> None:
    module = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    vars(module)["download_and_extract_asset"] = lambda *_, **__: None
    sys.modules[module.__name__] = module


def _no_transformer_engine() -> None:
    """Layers of Megatron's own in place of Transformer Engine's."""
    from megatron.core import utils
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.moe import moe_utils

    # Up to 0.16 upstream's conftest compares the version of a package that it takes for granted.
    utils._te_version = utils._te_version or Version("0.0.0")
    specs.get_gpt_layer_with_transformer_engine_spec = specs.get_gpt_layer_local_spec
    for name in ("get_gpt_decoder_block_spec", "get_gpt_mtp_block_spec"):
        setattr(specs, name, _local(getattr(specs, name)))
    # 0.16 reads a name that it has bound only where the package is there.
    vars(moe_utils).setdefault("te_general_gemm", None)
    # After 0.19 this asks isinstance of what is no class without the package.
    for module in list(sys.modules.values()):
        if "is_inference_column_parallel_linear" in vars(module):
            module.is_inference_column_parallel_linear = lambda _: False


def _local(block_spec: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(block_spec)
    def local_block_spec(*args: Any, **kwargs: Any) -> Any:
        return block_spec(*args, **{**kwargs, "use_transformer_engine": False})

    return local_block_spec


def _nothing_to_set() -> None:
    """Variables for cuBLAS and NCCL, by a module that 0.19's tests ask for and older ones lack."""
    name = "megatron.training.determinism"
    if importlib.util.find_spec(name) is None:
        module = sys.modules[name] = types.ModuleType(name)
        vars(module)["apply_determinism_env"] = lambda _: None


def _groups_end_with_their_names() -> None:
    """Megatron forgets its groups and leaves them open: with gloo, each one's threads and sockets.

    After a dozen tests of eight ranks on a small machine, nothing moves any more.
    """
    from megatron.core import parallel_state

    begin, end = parallel_state.initialize_model_parallel, parallel_state.destroy_model_parallel
    made: list[Any] = []

    @functools.wraps(begin)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        parallel_state._GLOBAL_MEMORY_BUFFER = None
        before = set(c10d._world.pg_map)
        try:
            return begin(*args, **kwargs)
        finally:
            made.extend(group for group in c10d._world.pg_map if group not in before)

    @functools.wraps(end)
    def destroy_model_parallel() -> None:
        end()
        for group in made:
            if group in c10d._world.pg_map:
                dist.destroy_process_group(group)
        made.clear()
        parallel_state._set_global_memory_buffer()  # what local layers use and TE's do not

    parallel_state._set_global_memory_buffer()
    parallel_state.initialize_model_parallel = initialize_model_parallel
    parallel_state.destroy_model_parallel = destroy_model_parallel
