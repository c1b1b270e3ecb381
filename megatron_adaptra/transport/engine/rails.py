"""RDMA ports that carry messages: all that are active, or those that NCCL's variables name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_adaptra.base.log import GOES_ON, log_line
from megatron_adaptra.device.pci import SYSFS, nearest
from megatron_adaptra.transport.engine.addresses import (
    ANY,
    FAMILY,
    RANGE,
    VERSION,
    Choice,
    choice,
    left_out,
    number,
    value,
)
from megatron_adaptra.transport.engine.bindings import Port, ports

# NCCL's variables that are read here; NCCL_IB_DISABLE is another one.
VARIABLES = (
    "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", FAMILY, RANGE, VERSION, "NCCL_IB_TC", "NCCL_IB_SL",
    "NCCL_IB_PKEY", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_IB_QPS_PER_CONNECTION",
)  # fmt: skip


@dataclass(frozen=True)
class Service:
    """How a fabric is to carry packets, as NCCL's variables have it.

    Args:
        traffic_class: of the global route; of RoCE v2 the byte of DSCP and ECN.
        level: the service level.
        partition: the place of the partition key in the port's table.
        timeout: what is not acknowledged within 4.096 us * 2^timeout goes again; 0: never.
        retries: how often.
        connections: of one port to one peer, each with a queue pair; they share its memory.
    """

    traffic_class: int = 0
    level: int = 0
    partition: int = 0
    timeout: int = 16  # 0.27 s; NCCL: 20, but here another path takes over
    retries: int = 6
    connections: int = 1


@dataclass(frozen=True)
class Rail:
    """A port of a device. `gid`: the index of its address, -1 for the best one.

    `choice`: the addresses of which the best one is taken, on Ethernet.
    `far`: it serves when those that are nearer to this process's GPU do not work.
    """

    device: str
    port: int
    gid: int = -1
    far: bool = False
    service: Service = Service()
    choice: Choice = ANY

    def __str__(self) -> str:
        return f"{self.device}:{self.port}"


def rails(gpu: str = "", root: Path = SYSFS, *, speaks: bool = True) -> list[Rail]:
    """Return the rails of this process; the n-th one is connected to the n-th one of a peer.

    `gpu`: the bus address of the messages' GPU, if any: rails nearest to it are preferred, as by
    NCCL. `root`: of sysfs. `speaks`: this process logs what cannot be read and is left out.
    """
    if disabled(os.environ):
        return []
    found = ports()
    all_of_them = chosen(found, os.environ)
    ethernet = any(port.link == "Ethernet" for port in found)
    if speaks and ethernet and (why := left_out(os.environ)):
        log_line(f"{why}; {GOES_ON} without it")
    return preferred(all_of_them, gpu, root) if gpu else all_of_them


def preferred(found: Sequence[Rail], gpu: str, root: Path = SYSFS) -> list[Rail]:
    """Return the rails `found`, in their order; all but those nearest to `gpu` are marked far.

    `root`: of sysfs.
    """
    near = nearest(gpu, frozenset(rail.device for rail in found), root)
    return [replace(rail, far=rail.device not in near) for rail in found]


def chosen(found: Sequence[Port], environ: Mapping[str, str]) -> list[Rail]:
    """Return rails of the ports `found` that the variables of `environ` choose, as NCCL does.

    A port with several connections to a peer stands there as often, each time after all others:
    two peers that have different numbers of them connect the same ports nevertheless.

    NCCL_IB_HCA: names or their beginnings ("mlx5"), with a port or without ("mlx5_1:1"); after "="
    whole names, after "^" those to leave out. Its ports are taken in its order, also while they are
    down; without it all active ports. The rest: see `fabric`. Raises BadInput, as `fabric` does.
    """
    gid, which, service = fabric(environ)
    text = environ.get("NCCL_IB_HCA", "")
    without, text = text.startswith("^"), text.removeprefix("^")
    exact, text = text.startswith("="), text.removeprefix("=")
    names = [name for name in text.split(",") if name]

    def place(port: Port) -> int | None:
        for n, name in enumerate(names):
            device, _, of_port = name.partition(":")
            same = port.device == device if exact else port.device.startswith(device)
            if same and of_port in ("", str(port.port)):
                return n
        return None

    if names and not without:
        wanted = sorted(
            (p for p in found if place(p) is not None),
            key=lambda p: (place(p), p.device, p.port),
        )
    else:
        wanted = [p for p in found if p.active and place(p) is None]
        wanted.sort(key=lambda p: (p.device, p.port))
    once = [Rail(port.device, port.port, gid, service=service, choice=which) for port in wanted]
    return once * service.connections


def fabric(environ: Mapping[str, str]) -> tuple[int, Choice, Service]:
    """Return the addresses to take and how to carry packets, as `environ` has it.

    Raises BadInput for a text that is no number, a number out of range for verbs, and an unknown
    family of addresses.
    """
    which, usual = choice(environ), Service()
    service = Service(
        traffic_class=number(environ, "NCCL_IB_TC", 0, 255, usual.traffic_class),
        level=number(environ, "NCCL_IB_SL", 0, 15, usual.level),
        partition=number(environ, "NCCL_IB_PKEY", 0, 65535, usual.partition),
        timeout=number(environ, "NCCL_IB_TIMEOUT", 0, 31, usual.timeout),
        retries=number(environ, "NCCL_IB_RETRY_CNT", 0, 7, usual.retries),
        connections=number(environ, "NCCL_IB_QPS_PER_CONNECTION", 1, 128, usual.connections),
    )
    return number(environ, "NCCL_IB_GID_INDEX", -1, 255, -1), which, service


def disabled(environ: Mapping[str, str]) -> bool:
    """Return whether NCCL_IB_DISABLE of `environ` is a number other than 0: no RDMA, then."""
    return bool(value(environ.get("NCCL_IB_DISABLE", "").strip()))
