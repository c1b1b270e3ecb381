"""GPUs: the driver, what is near to each, how work is queued, and how messages are staged.

Messages of GPUs are staged in the host's memory: the question is whether it is pinned, and whose.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron_adaptra.base.errors import DeviceFailed, line_of
from megatron_adaptra.device import gpu_bindings
from megatron_adaptra.device.pci import Distance, cores_near, in_sysfs, nic_of, node_near
from megatron_adaptra.doctor.finding import Finding, fail, ok, warn
from megatron_adaptra.transport.engine.bindings import new_engine
from megatron_adaptra.view.axis import size

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_NEAR = {
    Distance.SWITCH: "one switch away",
    Distance.ROOT_PORT: "below one root port",
    Distance.NODE: "in one NUMA node",
}
_DEVICE_FILES = ("nvidiactl", "dxg")
_BY_ADDRESS = Path("driver") / "nvidia" / "gpus"  # below /proc
STAGING = "staging"
TRIED = 64 << 20  # bytes: of a large message
_UNLIMITED = "ulimit -l unlimited (containers: --ulimit memlock=-1)"
# No setting limits the pool alone.
_POOL = (
    "the pool has no size of its own: what the plan's messages take, within "
    "--adaptra-activation-budget where that is in bytes"
)


def gpus(root: Path = Path("/")) -> Iterator[Finding]:
    """Check the GPUs; `root`: of the file systems that the kernel and the driver show."""
    there = any((root / "dev" / name).exists() for name in _DEVICE_FILES)
    if why := gpu_bindings.missing():
        if there:
            says = f"messages of GPUs stay with NCCL, and no link is measured: {why}"
            yield fail("GPUs", says, "nvidia-smi says whether the driver works")
        else:
            yield ok("GPUs", "none: everything runs on CPUs and gloo")
        yield from staging()
        return
    yield ok("GPUs", "the driver works")
    for folder in sorted((root / "proc" / _BY_ADDRESS).glob("*")):
        yield _neighbours(folder.name, root / "sys")
    yield _queues()
    yield from staging()


def _neighbours(pci: str, sysfs: Path) -> Finding:
    """Find what is near to the GPU at `pci`; warn if no near core is allowed to this process."""
    nics = nic_of(pci, sysfs)
    least = min((nic.distance for nic in nics), default=Distance.FAR)
    names = ", ".join(nic.name for nic in nics if nic.distance is least)
    says = f"{names} {_NEAR[least]}" if least in _NEAR else "no interface is near to it"
    cores = cores_near(pci, sysfs)
    if (near := _listed(cores)) and not near & os.sched_getaffinity(0):
        says += f"; this process may use none of the cores of its NUMA node ({cores}), so launches"
        says += " and what the host computes for it cross from another one"
        remedy = f"taskset -c {cores} (Slurm: --gres-flags=enforce-binding; containers: "
        return warn(f"GPU {pci}", says, f"{remedy}--cpuset-cpus {cores})")
    return ok(f"GPU {pci}", says)


def _listed(cores: str) -> set[int]:
    """Return the numbers of a list such as "0-15,32"; none for any other text."""
    found: set[int] = set()
    for part in cores.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return set()
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _queues() -> Finding:
    value = os.environ.get(QUEUES)
    if value is None:
        says = "unset: 8; Megatron asks for 1 where it overlaps tensor parallelism"
        return ok(QUEUES, says)
    if not value.isdecimal() or not 1 <= int(value) <= 32:
        return warn(QUEUES, f"{value!r} is no number from 1 to 32", f"export {QUEUES}=1")
    return ok(QUEUES, value)


def staging() -> Iterator[Finding]:
    """Check how the first GPU's driver pins as much memory as a large message takes."""
    if gpu_bindings.missing():
        yield ok(STAGING, "none in force: without a GPU messages leave from where they are")
        return
    try:
        copied, unpinned, far = _tried()
    except (DeviceFailed, RuntimeError) as error:
        remedy = "nvidia-smi says whether another process has the GPU for itself"
        yield warn(STAGING, f"not tried, for the GPU cannot be opened: {line_of(error)}", remedy)
        return
    tried = f"{size(TRIED)} tried"
    if unpinned:
        says = f"not pinned, so that copies take longer: {line_of(unpinned)} ({tried})"
        yield warn(STAGING, says, _UNLIMITED)
    elif copied:
        says = "pinned, but memory of the driver, from where the engine copies once more: "
        yield warn(STAGING, f"{says}{line_of(copied)} ({tried}); {_POOL}", _UNLIMITED)
    elif far:
        says = f"pinned, memory of the engine, but not on the GPU's NUMA node: {far} ({tried}); "
        yield warn(STAGING, f"{says}{_POOL}", "containers: --cap-add SYS_NICE")
    else:
        yield ok(STAGING, f"pinned, memory of the engine ({tried}); {_POOL}")


def _tried() -> tuple[str, str, str]:
    """Return three faults: copied once more, not pinned, not near the GPU; empty for none."""
    device = gpu_bindings.open_device(0)
    engine = new_engine(1 << 20, 1 << 20, 5.0)
    pinned = gpu_bindings.new_pinned(device, engine, TRIED)
    try:
        node = node_near(in_sysfs(device.pci()))
        far = "" if node is None else engine.prefer_node(node)
        unpinned = pinned.reserve(TRIED, 1)
        return pinned.copied(), unpinned, far
    finally:
        pinned.close(device)
        device.close(5.0)
        engine.close("the doctor has seen it")
