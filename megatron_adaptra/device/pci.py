"""How far network interfaces are from a GPU on the machine's buses, as sysfs says.

NCCL takes the nearest one for each GPU (its topology's PIX, PXB, PHB and SYS); so do messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

SYSFS = Path("/sys")


class Distance(IntEnum):
    """A distance ranks the way between two devices by what it crosses, the nearest first."""

    SWITCH = 0  # one switch
    ROOT_PORT = 1  # several switches below one root port
    NODE = 2  # the host bridges of one NUMA node
    FAR = 3  # more, or unknown


@dataclass(frozen=True, order=True)
class Nic:
    """An interface: an RDMA device (`rdma`), else one of the network; nearest ones first."""

    distance: Distance
    rdma: bool
    name: str


def in_sysfs(pci: str) -> str:
    """Return the address `pci`, as a driver writes it (`00000000:1B:00.0`), as sysfs writes it."""
    domain, _, rest = pci.lower().partition(":")
    return f"{domain[-4:].zfill(4)}:{rest}"


def nic_of(pci: str, root: Path = SYSFS) -> list[Nic]:
    """All interfaces by their distance from the GPU `pci`, such as `0000:1b:00.0`.

    `root`: of sysfs. Interfaces without hardware are left out. A GPU that does not exist is far
    from all.
    """
    gpu = (root / "bus" / "pci" / "devices" / pci).resolve()
    found = []
    for kind, rdma in (("infiniband", True), ("net", False)):
        for entry in sorted((root / "class" / kind).glob("*")):
            device = (entry / "device").resolve()
            if _bridges(device):
                found.append(Nic(distance(gpu, device), rdma, entry.name))
    return sorted(found)


def nearest(pci: str, names: frozenset[str], root: Path = SYSFS) -> frozenset[str]:
    """Return those of the RDMA devices `names` that are nearest to the GPU `pci`.

    All of them where nothing is known. `root`: of sysfs.
    """
    known = [nic for nic in nic_of(pci, root) if nic.rdma and nic.name in names]
    least = min((nic.distance for nic in known), default=None)
    return frozenset(nic.name for nic in known if nic.distance == least) or names


def cores_near(pci: str, root: Path = SYSFS) -> str:
    """The cores of the GPU `pci`'s NUMA node, such as "0-15,32-47"; empty where nothing is known.

    `root`: of sysfs. On a machine with one node these are all cores.
    """
    try:
        return (root / "bus" / "pci" / "devices" / pci / "local_cpulist").read_text().strip()
    except OSError:
        return ""


def node_near(pci: str, root: Path = SYSFS) -> int | None:
    """The NUMA node of the GPU `pci`; None where nothing is known, or there is one node alone.

    `root`: of sysfs.
    """
    if len(list((root / "devices" / "system" / "node").glob("node[0-9]*"))) < 2:
        return None
    return _node((root / "bus" / "pci" / "devices" / pci).resolve())


def distance(one: Path, other: Path) -> Distance:
    """Return the distance between two devices, given by their folders in sysfs."""
    a, b = _bridges(one), _bridges(other)
    if not a or not b:
        return Distance.FAR
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    if shared == 0:
        node = _node(one)
        return Distance.NODE if node is not None and node == _node(other) else Distance.FAR
    # Below the switch that both have, each has its port of it and itself.
    return Distance.SWITCH if max(len(a), len(b)) - shared <= 2 else Distance.ROOT_PORT


def _bridges(device: Path) -> list[str]:
    """Return the addresses from the root port down to the device; a virtual device has none."""
    return [part for part in device.parts if part.count(":") == 2 and "." in part]


def _node(device: Path) -> int | None:
    """Its NUMA node; None where the machine does not say."""
    for folder in (device, *device.parents):
        try:
            node = int((folder / "numa_node").read_text())
        except (OSError, ValueError):
            continue
        return node if node >= 0 else None
    return None
