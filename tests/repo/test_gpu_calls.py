"""Streams, events, pinned memory, copies and waits of a GPU are asked for in one package alone."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_adaptra"
LAYER = PACKAGE / "device"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if LAYER not in path.parents]

# What others may ask torch.cuda for: which GPU and NCCL there are, and figures of its memory.
FREE = {
    "current_device", "device_count", "get_device_name", "is_available", "is_initialized",
    "max_memory_allocated", "mem_get_info", "memory_allocated", "memory_reserved", "memory_stats",
    "nccl", "random", "reset_peak_memory_stats",
}  # fmt: skip
# Of tensors and of torch itself, wherever they come from.
CALLS = {"pin_memory", "record_stream", "cudart", "memcpy_async", "elapsed_time"}
WORDS = {"pin_memory", "non_blocking"}  # arguments
EXCEPTIONS = {
    # Stand-ins for these, where there is no GPU.
    "adapter/baseline/cpu.py": {".pin_memory": 1, ".record_stream": 1},
    # Asked for its device alone: states are made for that of Megatron's tracker.
    "adapter/pipeline/home_random.py": {"torch.cuda.default_generators": 1},
}  # fmt: skip


def chain(node: ast.AST) -> str:
    """`torch.cuda.Stream` for the attribute of that name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def asked(source: str) -> Counter[str]:
    """What the source asks of a GPU, and how often."""
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = chain(node)
            package, _, what = name.rpartition(".")
            if package == "torch.cuda" and what not in FREE:
                found[name] += 1
            elif node.attr in CALLS:
                found[f".{node.attr}"] += 1
        elif isinstance(node, ast.Call):
            for argument in node.keywords:
                on = not (isinstance(argument.value, ast.Constant) and not argument.value.value)
                if argument.arg in WORDS and on:
                    found[f"{argument.arg}="] += 1
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
            found.update(f"torch.cuda.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith(
            ("libcuda", "libcudart")
        ):
            found[str(node.value)] += 1
    return found


def test_only_the_device_layer_works_on_a_gpu() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): asked(path.read_text()) for path in FILES}
    assert {path: calls for path, calls in found.items() if calls} == EXCEPTIONS


# What a folder of the engine may include; the README there says why.
BELOW = {
    "core": {"core"},
    "tcp": {"core", "tcp"}, "shm": {"core", "shm"}, "verbs": {"core", "verbs"},
    "": {"", "core", "tcp", "shm", "verbs"},
    "gpu": {"", "core", "gpu"},
    "bindings": {"", "core", "gpu", "bindings"},
}  # fmt: skip


def test_folders_of_the_engine_include_only_what_is_below_them() -> None:
    for path in (ENGINE := ROOT / "csrc" / "rdma_offload").rglob("*.[ch]*"):
        included = re.findall(r'#include "(?:(\w+)/)?\w+\.h"', path.read_text())
        assert included or path.suffix == ".h", path
        folder = "" if path.parent == ENGINE else path.parent.name
        assert set(included) <= BELOW[folder], path
