"""Putting the plugin into a process that will import Megatron's training program.

`register` asks to be called when modules of Megatron are imported, and the functions that a
training program goes through are wrapped before any module can bind their names. Nothing is
imported early.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import wrapt

from megatron_adaptra.adapter.compat.patches import PATCHES
from megatron_adaptra.adapter.entry.plugin import PLUGIN

_registered = False


def register() -> None:
    """Put `--adaptra` into Megatron's parser, and what it needs into its training program.

    Call it before anything imports Megatron; a second call does nothing. On a machine without CUDA
    where the command line asks for gloo, the CPU stand-ins are installed first. Raises RuntimeError
    if Megatron's training program has been imported already.
    """
    global _registered
    if _registered:
        return
    modules = {PATCHES[entry].targets[0].partition(":")[0] for entry in PLUGIN.wrappers}
    late = [name for name in sorted(modules) if name in sys.modules]
    if late:
        raise RuntimeError(f"call megatron_adaptra.register() before anything imports {late[0]}")
    _registered = True
    if _asks_for_gloo(sys.argv[1:]):
        _stand_in_for_cuda()
    for module in modules:
        wrapt.register_post_import_hook(PLUGIN.wrap, module)


def _asks_for_gloo(argv: list[str]) -> bool:
    """Return whether `argv` has `--distributed-backend gloo`, Megatron's for training on CPUs."""
    flag = "--distributed-backend"
    return f"{flag}=gloo" in argv or any(pair == (flag, "gloo") for pair in pairwise(argv))


def _stand_in_for_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        from megatron_adaptra.adapter.baseline import cpu

        cpu.install()
