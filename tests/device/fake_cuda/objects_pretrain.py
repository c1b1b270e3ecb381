"""The training script of the tests, whose objects go between ranks by gloo instead of NCCL.

torch's collectives of objects compute their sizes on the device, where the fake computes nothing.
Checkpoints of format torch_dist use them.
"""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

SCRIPT = Path(__file__).resolve().parents[2] / "train" / "ranks" / "pretrain_gpt_small.py"
OF_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


def _by_gloo(function: Callable[..., Any], world: dict[str, Any]) -> Callable[..., Any]:
    def call(*words: Any, **named: Any) -> Any:
        given = inspect.signature(function).bind(*words, **named)
        group = given.arguments.get("group")
        if group is None or dist.get_world_size(group) == dist.get_world_size():
            given.arguments["group"] = world["by gloo"]
        return function(*given.args, **given.kwargs)

    return call


def _with_gloo(function: Callable[..., Any], world: dict[str, Any]) -> Callable[..., Any]:
    def call(*words: Any, **named: Any) -> None:
        function(*words, **named)
        world["by gloo"] = dist.new_group(backend="gloo")

    return call


if __name__ == "__main__":
    world: dict[str, Any] = {}
    for name in (*OF_OBJECTS, "init_process_group"):
        change = _by_gloo if name in OF_OBJECTS else _with_gloo
        replaced = change(getattr(distributed_c10d, name), world)
        for module in (dist, distributed_c10d):
            setattr(module, name, replaced)
    sys.path[0] = str(SCRIPT.parent)
    runpy.run_path(str(SCRIPT), run_name="__main__")
