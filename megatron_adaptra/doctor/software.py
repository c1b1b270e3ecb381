"""torch, Megatron, and what the plugin patches of them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Generator, Iterator
from typing import Any

from megatron_adaptra import __version__
from megatron_adaptra.adapter.compat.patches import PATCHES, is_there
from megatron_adaptra.adapter.compat.profiles import (
    NEEDED_BY_EXECUTOR,
    NEWEST,
    SUPPORTED,
    installed_version,
    is_known,
    lacking,
    profile,
    verify,
)
from megatron_adaptra.doctor.finding import Finding, fail, ok, warn
from megatron_adaptra.errors import UnsupportedMegatron, line_of
from megatron_adaptra.package import HERE

OPTIONAL = ("transformer-engine", "apex")


def software() -> Iterator[Finding]:
    """What is installed here, and how it fits together."""
    yield ok("megatron-adaptra", f"{__version__} at {HERE}")
    torch = yield from _torch()
    yield from _megatron(torch)
    for name in OPTIONAL:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed; it is optional"
        yield ok(name, version)


def _torch() -> Generator[Finding, None, Any]:
    """Its findings; returns the module, or None."""
    if importlib.util.find_spec("torch") is None:
        says = "not installed: plans can be made here, but nothing trains"
        yield fail("torch", says, "pip install torch")
        return None
    try:
        torch: Any = importlib.import_module("torch")
        dist: Any = importlib.import_module("torch.distributed")
    except Exception as error:  # of any kind: its libraries may not fit
        yield fail(
            "torch",
            f"it cannot be imported: {line_of(error)}",
            "pip install --force-reinstall torch",
        )
        return None
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    yield ok("torch", f"{torch.__version__}, {build}")
    if not dist.is_available() or not dist.is_gloo_available():
        yield fail("gloo", "this torch has none", "pip install --force-reinstall torch")
    if torch.version.cuda and dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        yield ok("NCCL", f"{version}, of torch")
    return torch


def _megatron(torch: Any) -> Iterator[Finding]:
    what = "megatron-core"
    try:
        version = installed_version()
    except UnsupportedMegatron as error:
        remedy = "pip install megatron-core, or put a checkout of Megatron-LM first in PYTHONPATH"
        yield fail(what, line_of(error), remedy)
        return
    line = "a known line" if is_known() else f"newer than {NEWEST}, the newest known: engine native"
    try:
        row = profile()
        if torch is None:
            yield ok(what, f"{version}, {line}; nothing of it is checked without torch")
            return
        verify(row)
    except UnsupportedMegatron as error:
        says = f"{line_of(error)}; it would train as stock"
        yield fail(what, says, f"pip install 'megatron-core>={SUPPORTED.split()[0]}'")
        return
    except Exception as error:  # what Megatron imports may be missing
        yield fail(what, f"{version} cannot be imported: {line_of(error)}", _install(error))
        return
    yield ok(what, f"{version}, {line}; all that is called of it is there")
    yield from _patches()


def _install(error: Exception) -> str:
    name = getattr(error, "name", None)
    return (
        f"pip install {name}" if isinstance(error, ImportError) and name else "read its last line"
    )


def _patches() -> Iterator[Finding]:
    """Of each entry of the registry whether its targets are there."""
    program = importlib.util.find_spec("megatron.training") is not None
    if not program:
        yield ok("Megatron's program", "not here: only megatron-core is, for programs of your own")
    for name, entry in PATCHES.items():
        targets = [t for t in entry.targets if program or not t.startswith("megatron.training")]
        if not targets:
            continue
        gone = [target for target in targets if not is_there(target)]
        what = f"patch {name}"
        if not gone:
            yield ok(what, entry.why)
        elif entry.feature:
            says = f"{gone[0]} does not exist; off: {entry.feature}"
            yield warn(what, says, f"use a release from {SUPPORTED}")
        else:
            says = f"{gone[0]} does not exist: it would train as stock"
            yield fail(what, says, f"use a release from {SUPPORTED}")
    if words := lacking(NEEDED_BY_EXECUTOR):
        says = f"{words}: engine native runs instead"
        yield warn("engine executor", says, f"use a release from {SUPPORTED}")
    else:
        yield ok("engine executor", "all that it calls is there")
