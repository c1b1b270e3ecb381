"""GPUs: the driver, what is near to each, and variables that decide how work is queued."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron_adaptra.device import gpu_bindings
from megatron_adaptra.device.pci import Distance, cores_near, nic_of
from megatron_adaptra.doctor.finding import Finding, fail, ok, warn
from megatron_adaptra.doctor.staging import staging

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_NEAR = {
    Distance.SWITCH: "one switch away",
    Distance.ROOT_PORT: "below one root port",
    Distance.NODE: "in one NUMA node",
}
_DEVICE_FILES = ("nvidiactl", "dxg")
_BY_ADDRESS = Path("driver") / "nvidia" / "gpus"  # below /proc


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
