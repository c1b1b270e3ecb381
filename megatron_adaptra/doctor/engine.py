"""The engine, its parts, and the RDMA ports that it may use."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from megatron_adaptra.base.errors import BadInput, line_of
from megatron_adaptra.base.package import how_to_build
from megatron_adaptra.doctor.finding import Finding, counted, fail, ok, text_of, warn
from megatron_adaptra.transport.engine import bindings
from megatron_adaptra.transport.engine.addresses import ANY, FAMILY, RANGE, VERSION, left_out
from megatron_adaptra.transport.engine.bindings import Port
from megatron_adaptra.transport.engine.dial import open_rail
from megatron_adaptra.transport.engine.rails import VARIABLES, Rail, chosen, disabled, fabric

# Counters of faults of cables and ports; congestion and lost packets are no fault of this host.
_BROKEN = (
    "symbol_error", "port_rcv_errors", "link_downed", "link_error_recovery",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors",
)  # fmt: skip


def engine(root: Path = Path("/")) -> Iterator[Finding]:
    """Check the engine, TLS and RDMA; `root`: of the file systems that the kernel shows."""
    if why := bindings.not_built():
        yield warn("engine", f"{why}; messages go over gloo", how_to_build())
    else:
        yield ok("engine", "built: shared memory and TCP")
        if why := bindings.missing_tls():
            yield warn("TLS", f"messages cannot be encrypted: {why}", "apt-get install libssl3")
        else:
            yield ok("TLS", "messages can be encrypted")
    yield from rdma(_ports(), root / "sys")


def _ports() -> list[Port]:
    """Return the ports that the engine sees, with the addresses that messages would use.

    An index that a variable names counts, whatever the family of its address.
    """
    try:
        gid, which, _ = fabric(os.environ)
        return bindings.ports(ANY if gid >= 0 else which)
    except BadInput:  # `rdma` reports it
        return bindings.ports()


def rdma(ports: Sequence[Port], root: Path) -> Iterator[Finding]:
    """Check the RDMA `ports` that the engine sees, and the devices that the kernel shows.

    `root`: of sysfs.
    """
    devices = sorted(folder.name for folder in (root / "class" / "infiniband").glob("*"))
    if not devices:
        yield ok("RDMA", "there is no device: messages go over TCP and shared memory")
        return
    if not bindings.missing() and (why := bindings.missing_verbs()):
        says = f"{', '.join(devices)} cannot be used: {why}"
        yield fail("RDMA", says, "apt-get install libibverbs1 ibverbs-providers")
        return
    used = yield from _chosen(ports)
    known = {(port.device, port.port): port for port in ports}
    for device in devices:
        for folder in sorted((root / "class" / "infiniband" / device / "ports").glob("*")):
            port = known.get((device, int(folder.name)))
            yield _port(device, folder, port, [rail for rail in used if rail.device == device])
    active = {(port.device, port.port): port.gid_index for port in ports if port.active}
    there = [rail for rail in used if (rail.device, rail.port) in active]
    yield from opened([r for r in there if max(r.gid, active[r.device, r.port]) >= 0])


def opened(rails: Sequence[Rail]) -> Iterator[Finding]:
    """Open a queue pair on each of the `rails`, as a training does, and give what fails."""
    if bindings.missing() or not rails:
        return
    engine = bindings.new_engine(1 << 20, 1 << 20, 5.0)
    engine.add_peer(0, "rank 0")
    for rail in rails:
        try:
            open_rail(engine, 0, rail)
        except RuntimeError as error:
            says = f"{line_of(error)}: messages do without it"
            yield warn(f"queue pair {rail}", says, _remedy(rail, str(error)))
    engine.close("the doctor has seen it")


def _remedy(rail: Rail, why: str) -> str:
    keys = f"/sys/class/infiniband/{rail.device}/ports/{rail.port}/pkeys"
    for words, remedy in (
        ("cannot register memory", "ulimit -l unlimited (containers: --ulimit memlock=-1)"),
        ("partition keys", f"export NCCL_IB_PKEY= to the place of one: grep . {keys}/*"),
        ("GID", "unset NCCL_IB_GID_INDEX, or export the index of a GID that show_gids lists"),
    ):
        if words in why:
            return remedy
    return f"ibv_devinfo -v -d {rail.device} -i {rail.port} shows its limits"


def _chosen(ports: Sequence[Port]) -> Generator[Finding, None, list[Rail]]:
    """Report which of `ports` carry messages, and return them."""
    what = "RDMA"
    named = [f"{n}={os.environ[n]}" for n in VARIABLES if n in os.environ]
    by = f" ({', '.join(named)})" if named else ""
    if disabled(os.environ):
        value = os.environ["NCCL_IB_DISABLE"]
        says = f"not used, for NCCL_IB_DISABLE={value}: messages go over TCP"
        yield warn(what, says, "unset NCCL_IB_DISABLE")
        return []
    try:
        rails = list(dict.fromkeys(chosen(ports, os.environ)))  # one of each port
    except BadInput as error:
        yield fail(what, line_of(error), f"unset {error.field}")
        return []
    if rails:
        names = ", ".join(f"{rail.device}:{rail.port}" for rail in rails)
        yield ok(what, f"messages use {names}{by}")
    elif bindings.missing():
        yield warn(what, "no port is used, for there is no engine", "build the engine, see above")
    elif ports:
        yield warn(what, f"no port is used{by}: messages go over TCP", "see the ports below")
    else:
        yield warn(what, "the engine sees no port: messages go over TCP", "ibv_devinfo says more")
    if why := left_out(os.environ):
        yield warn(RANGE, f"{why}; messages do without it", f"unset {RANGE}")
    return rails


def _port(device: str, folder: Path, port: Port | None, used: Sequence[Rail]) -> Finding:
    """Check the port with that `folder` in sysfs; `port`: the same as verbs see it, or None."""
    what = f"port {device}:{folder.name}"
    state, rate, link = (text_of(folder / name) for name in ("state", "rate", "link_layer"))
    parts = [part for part in (state.partition(": ")[2].lower() or state, rate, link) if part]
    if port is not None:
        address = f"GID {port.gid_index}, {port.why}" if port.gid_index >= 0 else port.why
        parts.append(address)
    says = ", ".join(parts)
    if port is not None and not port.active:
        remedy = f"rdma link show {device}/{folder.name}; then its cable, its interface, its switch"
        return warn(what, says, remedy)
    if port is not None and port.gid_index < 0:
        remedy = "give its interface an address: ip address add ... dev ..."
        if any(rail.choice.family for rail in used):
            remedy += f", or unset {FAMILY}"
        if any(rail.choice.version for rail in used):
            remedy += f", or unset {VERSION}"
        return warn(what, says, remedy)
    if port is not None and any(_outside(port, rail) for rail in used):
        return warn(what, says, f"export {RANGE}= to the range of its address, or unset it")
    if wrong := counted(folder / "counters", _BROKEN):
        remedy = "look at the cable and the switch port; these count since the driver started"
        return warn(what, f"{says}; {wrong}", remedy)
    return ok(what, says if used or port is None else f"{says}; not used")


def _outside(port: Port, rail: Rail) -> bool:
    """Return whether the `rail` asks for a range of addresses without the one of the `port`."""
    return port.link == "Ethernet" and rail.gid < 0 and not rail.choice.has(port.gid)
