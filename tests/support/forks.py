"""Processes of tests: forks of one server that has imported what their bodies need.

A process that imports the tests' module and what that imports takes longer than most bodies. The
server of multiprocessing does it once; a module that cannot be imported costs each process its
own import, and is no error.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing as mp
import os
import sys
import threading
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

MODULES = (
    "pytest", "hypothesis", "numpy", "torch", "torch.distributed", "patience",
    "megatron_adaptra.adapter.compat.patches", "megatron_adaptra.device.cuda",
    "megatron_adaptra.execute.small.small_collectives",
    "megatron_adaptra.adapt.reductions.remedy", "megatron_adaptra.agree.controller",
    "megatron_adaptra.execute.executor", "megatron_adaptra.adapt.routes.remedy",
    "megatron_adaptra.transport.engine.on_device", "transport.ranks", "fakes.controlled_cuda.gpu",
    "agree.pipeline", "adapt.replica_job",
)  # fmt: skip
OURS = "PYTHONPATH_BEFORE"  # what PYTHONPATH was, for the server's processes

_starting = threading.Lock()  # one thread at a time: the environment is the process's
_processes = mp.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


def processes() -> ForkServerContext:
    """The context of multiprocessing whose processes are forks of the server, which runs."""
    with _starting:
        # Until Python 3.13 the server does not get sys.path, where pytest has put tests' folders.
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        os.environ[OURS] = before or ""
        try:
            forkserver.ensure_running()
        finally:
            _restore()
    return _processes


def _restore() -> None:
    before = os.environ.pop(OURS)
    if before:
        os.environ["PYTHONPATH"] = before
    else:
        os.environ.pop("PYTHONPATH", None)


def _in_the_server() -> None:
    _restore()
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # no process looks through it, and so none copies its pages


if OURS in os.environ:
    _in_the_server()
