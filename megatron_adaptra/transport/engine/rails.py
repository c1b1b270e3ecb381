"""Which RDMA ports carry messages: all that are active, or those that NCCL's variables name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_adaptra.device.pci import SYSFS, nearest
from megatron_adaptra.errors import BadInput
from megatron_adaptra.transport.engine.bindings import Port, ports


@dataclass(frozen=True)
class Rail:
    """A port of a device. `gid`: the index of its address, -1 for the best one.

    `far`: it serves when those that are nearer to this process's GPU do not work.
    """

    device: str
    port: int
    gid: int = -1
    far: bool = False

    def __str__(self) -> str:
        return f"{self.device}:{self.port}"


def rails(gpu: str = "", root: Path = SYSFS) -> list[Rail]:
    """Those of this process; its n-th one is connected to the n-th one of a peer.

    `gpu`: its address on the bus, if messages are of one: those nearest to it are preferred, as by
    NCCL. `root`: of sysfs.
    """
    if os.environ.get("NCCL_IB_DISABLE") == "1":
        return []
    all_of_them = chosen(ports(), os.environ)
    return preferred(all_of_them, gpu, root) if gpu else all_of_them


def preferred(found: Sequence[Rail], gpu: str, root: Path = SYSFS) -> list[Rail]:
    """The rails `found`, in their order, of which those are far that are not nearest to `gpu`.

    `root`: of sysfs.
    """
    near = nearest(gpu, frozenset(rail.device for rail in found), root)
    return [replace(rail, far=rail.device not in near) for rail in found]


def chosen(found: Sequence[Port], environ: Mapping[str, str]) -> list[Rail]:
    """Those of the ports `found` that the variables of `environ` choose, read as NCCL does.

    NCCL_IB_HCA: names or their beginnings ("mlx5"), with a port or without ("mlx5_1:1"); after "="
    whole names, after "^" those to leave out. What it names is taken in its order, also while it is
    down; without it all active ports. NCCL_IB_GID_INDEX: of the address of each; BadInput if
    it is no number.
    """
    try:
        gid = int(environ.get("NCCL_IB_GID_INDEX") or -1)
    except ValueError:
        text = environ["NCCL_IB_GID_INDEX"]
        raise BadInput("NCCL_IB_GID_INDEX", text, "it has to be a number") from None
    text = environ.get("NCCL_IB_HCA", "")
    without, text = text.startswith("^"), text.removeprefix("^")
    exact, text = text.startswith("="), text.removeprefix("=")
    names = [name for name in text.split(",") if name]

    def place(port: Port) -> int | None:
        for n, name in enumerate(names):
            device, _, number = name.partition(":")
            same = port.device == device if exact else port.device.startswith(device)
            if same and number in ("", str(port.port)):
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
    return [Rail(port.device, port.port, gid) for port in wanted]
