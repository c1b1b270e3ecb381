"""torch, Megatron, and what the plugin patches of them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import shlex
import sys
from collections.abc import Generator, Iterator
from typing import Any

from megatron_adaptra import __version__
from megatron_adaptra.adapter.compat.patches import PATCHES, is_there
from megatron_adaptra.adapter.compat.profiles import (
    NEEDED,
    NEEDED_BY_EXECUTOR,
    NEWEST,
    SUPPORTED,
    installed_version,
    is_known,
    lacking,
    profile,
    verify,
)
from megatron_adaptra.base.errors import UnsupportedMegatron, line_of
from megatron_adaptra.base.package import HERE
from megatron_adaptra.doctor.finding import Finding, fail, ok, warn

OPTIONAL = ("transformer-engine", "apex")
# Modules that Megatron imports, where their package has another name.
_PACKAGES = {"yaml": "pyyaml", "PIL": "pillow", "transformer_engine": "transformer-engine[pytorch]"}


def software() -> Iterator[Finding]:
    """Check what is installed here, and how it fits together."""
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
    """Give the findings on torch; return its module, or None."""
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
        if (cause := _not_imported()) is not None:
            module, reason = cause
            says = f"{version}, but {module} cannot be imported: {line_of(reason)}"
            yield fail(what, says, _install(module, reason))
            return
        verify(row)
    except UnsupportedMegatron as error:
        says = f"{line_of(error)}; it would train as stock"
        yield fail(what, says, f"pip install 'megatron-core>={SUPPORTED.split()[0]}'")
        return
    yield ok(what, f"{version}, {line}; all that is called of it is there")
    yield from _patches()


def _has_program() -> bool:
    return importlib.util.find_spec("megatron.training") is not None


def _not_imported() -> tuple[str, Exception] | None:
    """Return the first installed module that we call or patch but cannot import, and its error."""
    targets = [*NEEDED, *NEEDED_BY_EXECUTOR, *(t for e in PATCHES.values() for t in e.targets)]
    for module in dict.fromkeys(target.partition(":")[0] for target in targets):
        if module.startswith("megatron.training") and not _has_program():
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            lacks = error.name if isinstance(error, ModuleNotFoundError) else None
            if not lacks or not f"{module}.".startswith(f"{lacks}."):  # else it is not installed
                return module, error
    return None


def _install(module: str, error: Exception) -> str:
    """Return the command to mend the import of `module`, which has failed with `error`."""
    lacks = (error.name if isinstance(error, ModuleNotFoundError) else None) or ""
    name = lacks.partition(".")[0]
    if name == "megatron":
        return "pip install --force-reinstall megatron-core, or take a whole checkout"
    if name:
        return f"pip install {_PACKAGES.get(name, name)}"
    return f"{shlex.join([sys.executable, '-c', f'import {module}'])} shows where"


def _patches() -> Iterator[Finding]:
    """Check for each entry of the registry of patches whether its targets are there."""
    program = _has_program()
    if not program:
        yield ok("Megatron's program", "not here: only megatron-core is, for programs of your own")
    for name, entry in PATCHES.items():
        targets = [t for t in entry.targets if program or not t.startswith("megatron.training")]
        if not targets:
            continue
        gone = [target for target in targets if not is_there(target)]
        gone = [] if entry.some and len(gone) < len(targets) else gone
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
