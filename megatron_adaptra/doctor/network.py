"""The network: where messages over TCP arrive, who reaches that, and the interfaces."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

from megatron_adaptra.doctor.finding import Finding, counted, fail, ok, text_of, warn
from megatron_adaptra.transport.address import (
    address_of,
    chosen_by_nccl,
    fault_here,
    local_address,
    named_for_gloo,
)

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACK = "lo"
_NODES = ("NNODES", "PET_NNODES", "SLURM_NNODES")
_COUNTERS = ("rx_errors", "tx_errors", "rx_crc_errors", "rx_missed_errors")
_UP = 0x1  # of an interface's flags
_VIRTUAL = re.compile(r"ifb|veth|docker|virbr|br-|vnet|dummy|tun|tap|cni|flannel|cali|lxc|podman")
_WORKS = ("", "up", "unknown")  # states of interfaces that work, virtual ones too


def network(root: Path) -> Iterator[Finding]:
    """Check the address and all interfaces; `root`: of the file systems that the kernel shows."""
    wrong = [*_named(root)]
    yield from wrong
    if not any(finding.what == GLOO for finding in wrong):
        yield _address()
    for folder in sorted((root / "sys" / "class" / "net").glob("*")):
        if folder.name != LOOPBACK and (folder / "operstate").exists():
            idle = _VIRTUAL.match(folder.name) and text_of(folder / "operstate") not in _WORKS
            if not idle:  # that a container's or a laboratory's interface is down is no news
                yield _interface(folder)


def _named(root: Path) -> Iterator[Finding]:
    """Give the faults of the interfaces that variables name."""
    names = [name for _, name in socket.if_nameindex()]
    for name in named_for_gloo():
        if name not in names:
            says = f"there is no interface {name!r}: no training starts"
        elif not address_of(name) and name not in _with_ipv6(root):
            says = f"interface {name!r} has no address: no training starts"
        else:
            continue
        yield fail(GLOO, says, f"export {GLOO}={_reachable()}")
    words = os.environ.get(NCCL, "")
    if words and not chosen_by_nccl(words, names):
        says = f"{words!r} chooses none of {', '.join(names)}: NCCL does not start"
        found = fail if (root / "dev" / "nvidiactl").exists() else warn
        yield found(NCCL, says, f"export {NCCL}={_reachable()}")


def _with_ipv6(root: Path) -> set[str]:
    """The interfaces that have an IPv6 address, which gloo takes, too."""
    try:
        lines = (root / "proc" / "net" / "if_inet6").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[-1] for line in lines if line.strip()}


def _reachable() -> str:
    """An interface that other hosts reach, as far as this one can know."""
    for _, name in socket.if_nameindex():
        address = address_of(name)
        if address and not _near(address) and not fault_here(address):
            return name
    return "<interface that the other hosts reach>"


def _near(address: str) -> str:
    """Why other hosts do not reach the `address`; empty if they may."""
    if ip_address(address).is_loopback:
        return "only this host reaches"
    return "only hosts of the same cable reach" if ip_address(address).is_link_local else ""


def _address() -> Finding:
    what, remedy = "address", f"export {GLOO}={_reachable()}"
    try:
        address = local_address()
    except OSError as error:
        return warn(what, f"none to listen at: {error}", remedy)
    master = os.environ.get("MASTER_ADDR") or socket.gethostname()
    named = os.environ.get(GLOO)
    why = f"by {GLOO}={named}" if named else f"it faces {master}"
    if fault := fault_here(address):
        return warn(what, f"{address} ({why}), but {fault}", remedy)
    if (near := _near(address)) and not _one_host(master):
        return warn(what, f"{address} ({why}), which {near}", f"for several hosts: {remedy}")
    reach = f", which {near}: enough, for one host is meant" if near else ""
    return ok(what, f"messages over TCP arrive at {address} ({why}){reach}")


def _one_host(master: str) -> bool:
    """Return whether variables show that the training stays on this host; False without them."""
    given = os.environ
    world = given.get("WORLD_SIZE")
    return (
        ("MASTER_ADDR" in given and (master == "localhost" or master.startswith("127.")))
        or (world is not None and world == given.get("LOCAL_WORLD_SIZE"))
        or any(given.get(name) == "1" for name in _NODES)
    )


def _interface(folder: Path) -> Finding:
    """Check an interface by its `folder` in sysfs."""
    name, state = folder.name, text_of(folder / "operstate")
    speed = text_of(folder / "speed")  # a virtual one has none
    parts = [state or "of unknown state"]
    if speed.isdecimal():
        parts.append(f"{int(speed) / 1000:g} Gbit/s")
    parts.append(f"MTU {text_of(folder / 'mtu')}")
    what, says = f"interface {name}", ", ".join(parts)
    if state not in _WORKS:
        on = text_of(folder / "flags")
        if on and int(on, 16) & _UP:
            return warn(what, f"{says}: it has no carrier", "look at its cable, or its other end")
        return warn(what, f"{says}: it carries nothing", f"ip link set {name} up, if it is needed")
    if (address := address_of(name)) and (near := _near(address)):
        return warn(what, f"{says}; {near} {address}", f"ip address add <address> dev {name}")
    if wrong := counted(folder / "statistics", _COUNTERS):
        return warn(what, f"{says}; {wrong} since it came up", f"ethtool -S {name}")
    return ok(what, says)
