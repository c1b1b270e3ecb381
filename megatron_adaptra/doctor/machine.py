"""The machine: its clock, cores and limits."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_adaptra.doctor.finding import Finding, ok, warn
from megatron_adaptra.doctor.network import network
from megatron_adaptra.view.axis import size

ROOT = Path("/")
CLOCKSOURCE = "sys/devices/system/clocksource/clocksource0"
FAST_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page")
LEAST_SHM = 64 << 20  # bytes: what a container has by default
LEAST_FILES = 4096


def machine(root: Path = ROOT) -> Iterator[Finding]:
    """`root`: of the file systems that the kernel shows."""
    yield ok("Python", f"{platform.python_version()} at {sys.executable}")
    yield ok("system", f"{platform.system()} {platform.release()}, {os.cpu_count()} CPUs")
    yield from _cores()
    yield from _clock(root)
    yield from _locked_memory(root)
    yield from _shared_memory(root)
    yield from _files()
    yield from network(root)


def _cores() -> Iterator[Finding]:
    ours, all_of_them = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if ours < all_of_them:
        yield ok("cores", f"this process may use {ours} of {all_of_them}")


def _clock(root: Path) -> Iterator[Finding]:
    folder = root / CLOCKSOURCE
    try:
        now = (folder / "current_clocksource").read_text().strip()
        others = (folder / "available_clocksource").read_text().split()
    except OSError:
        yield ok("clock", "the kernel does not say which one it reads")
        return
    if now in FAST_CLOCKS:
        yield ok("clock", f"{now}, read without a call into the kernel")
        return
    better = next((name for name in FAST_CLOCKS if name in others), "")
    says = f"{now}: each stamp of a message is a slow call into the kernel"
    if better:
        yield warn("clock", says, f"echo {better} > /{CLOCKSOURCE}/current_clocksource")
    else:
        yield warn("clock", says, "ask for a machine whose kernel trusts its time stamp counter")


def _locked_memory(root: Path) -> Iterator[Finding]:
    most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    what, says = "locked memory", f"{size(most)} at most"
    needed = any((root / "sys" / "class" / "infiniband").glob("*"))
    needed |= (root / "dev" / "nvidiactl").exists()
    if most == resource.RLIM_INFINITY:
        yield ok(what, "no limit")
    elif needed:
        remedy = "ulimit -l unlimited (containers: --ulimit memlock=-1)"
        yield warn(what, f"{says}: RDMA and pinned memory fail beyond that", remedy)
    else:
        yield ok(what, f"{says}, enough without RDMA devices and GPUs")


def _shared_memory(root: Path) -> Iterator[Finding]:
    try:
        found = os.statvfs(root / "dev" / "shm")
    except OSError:
        remedy = "mount -t tmpfs tmpfs /dev/shm"
        yield warn("shared memory", "there is no /dev/shm, which NCCL needs", remedy)
        return
    free = found.f_bavail * found.f_frsize
    if free <= LEAST_SHM:
        says = f"{size(free)} are free in /dev/shm, which is little for NCCL"
        yield warn("shared memory", says, "containers: --shm-size=8g, or --ipc=host")
    else:
        yield ok("shared memory", f"{size(free)} free in /dev/shm")


def _files() -> Iterator[Finding]:
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < LEAST_FILES:
        says = f"{most} per process: a large job's connections may be too many"
        yield warn("open files", says, f"ulimit -n {max(most, min(hard, 1 << 20))}")
    else:
        yield ok("open files", f"{most} per process")
