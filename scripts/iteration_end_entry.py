"""Run a Megatron script, and note every collective of its iterations: `THIS SCRIPT flags...`.

Each rank leaves a JSON list in the folder ADAPTRA_RECORDS: iteration, function of
torch.distributed, operation, elements, type, ranks of the group, and the place in Megatron that
called it.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import wrapt

FUNCTIONS = (
    "all_reduce", "broadcast", "barrier", "reduce", "all_gather", "all_gather_into_tensor",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather",
    "scatter", "all_gather_object", "gather_object", "scatter_object_list",
    "broadcast_object_list", "monitored_barrier", "_all_gather_base", "_reduce_scatter_base",
)  # fmt: skip
notes: list[dict[str, Any]] = []
iteration = -1


def place() -> str:
    """The innermost function of Megatron's on the stack, and whose it is."""
    for frame in reversed(traceback.extract_stack()):
        parts = Path(frame.filename).parts
        if "megatron" in parts:
            at = len(parts) - 1 - parts[::-1].index("megatron")
            return f"{'/'.join(parts[at + 1 :])} {frame.name}"
    return "elsewhere"


def noted(name: str) -> Any:
    function = getattr(dist, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if iteration >= 0:
            tensor = next((a for a in args if isinstance(a, torch.Tensor)), kwargs.get("tensor"))
            group = kwargs.get("group")
            group = dist.group.WORLD if group is None else group
            mine = group != dist.GroupMember.NON_GROUP_MEMBER
            notes.append({
                "iteration": iteration, "function": name,
                "op": str(kwargs.get("op", "")).rpartition(".")[2] or
                ("SUM" if name == "all_reduce" else ""),
                "elements": 0 if tensor is None else tensor.numel(),
                "type": "" if tensor is None else str(tensor.dtype).removeprefix("torch."),
                "ranks": dist.get_process_group_ranks(group) if mine else [],
                "place": place(),
            })  # fmt: skip
        return function(*args, **kwargs)

    return wrapper


def train_step(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    global iteration
    iteration += 1
    return wrapped(*args, **kwargs)


def hook(module: Any) -> None:
    wrapt.wrap_function_wrapper(module, "train_step", train_step)


def main() -> None:
    global iteration
    for name in FUNCTIONS:
        if hasattr(dist, name):
            setattr(dist, name, noted(name))
    wrapt.register_post_import_hook(hook, "megatron.training.training")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        iteration = -1
        out = Path(os.environ["ADAPTRA_RECORDS"]) / f"rank{os.environ['RANK']}.json"
        out.write_text(json.dumps(notes))


main()
