"""RDMA ports as pyverbs sees them, beside which the engine's own list is tested."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

_SYSFS = Path("/sys/class/infiniband")
_KINDS = ("InfiniBand", "RoCE v1", "RoCE v2")  # of addresses, as verbs number them
_LINKS = {1: "InfiniBand", 2: "Ethernet"}
_STATES = {1: "down", 2: "init", 3: "armed", 4: "active"}
_MTU = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}  # bytes


@dataclass(frozen=True)
class DevicePort:
    """A port. `mtu`: bytes; `gids`: its addresses and their kind, by index.

    `counters`: since the start of its driver, by the kernel's names, which differ between vendors.
    """

    device: str
    port: int
    state: str
    link: str
    mtu: int
    gids: dict[int, tuple[str, str]]
    counters: dict[str, int]


def device_ports() -> list[DevicePort]:
    """All ports of all devices of this machine."""
    from pyverbs import device

    names = sorted(found.name.decode() for found in device.get_device_list())
    ports = []
    for name in names:
        with device.Context(name=name) as context:
            for number in range(1, context.query_device().phys_port_cnt + 1):
                about = context.query_port(number)
                gids = {
                    entry.gid_index: (entry.gid_str(), _KINDS[entry.gid_type])
                    for entry in context.query_gid_table(about.gid_tbl_len)
                    if entry.port_num == number
                }
                ports.append(
                    DevicePort(
                        name,
                        number,
                        _STATES.get(about.state, f"state {about.state}"),
                        _LINKS.get(about.link_layer, "unknown"),
                        _MTU[about.active_mtu],
                        gids,
                        _counters(name, number),
                    )
                )
    return ports


def _counters(device: str, port: int) -> dict[str, int]:
    found = {}
    for folder in ("counters", "hw_counters"):
        for file in sorted((_SYSFS / device / "ports" / str(port) / folder).glob("*")):
            with contextlib.suppress(OSError, ValueError):  # some cannot be read, or are no numbers
                found[file.name] = int(file.read_text())
    return found
