"""A network that joins hosts by a bridge in the kernel, and slows links by its `netem`.

A veth pair leads from each host to the hub, a namespace with nothing but a bridge in it. On the
hub's port to a host, packets are classified by their sender; each slow link has a netem there. So
senders feel nothing of a full queue, as on a real path, and one call of `tc` changes all links.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_adaptra.base.errors import AdaptraError
from megatron_adaptra.emulate.rules import LinkRule
from megatron_adaptra.netlab.namespace import bring_up, entered, new
from megatron_adaptra.netlab.network import (
    INTERFACE,
    MTU,
    QUEUE,
    WAITING,
    Link,
    Network,
    Traffic,
    address,
)

# Never in the current folder, which an empty name in PATH stands for: this is root.
_PATH = ":".join(filter(os.path.isabs, f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin".split(":")))
_TIMEOUT = 30.0  # seconds for one call of ip or tc
_UNLIMITED = 125e9  # bytes/s
_ETHERNET = 14  # bytes of a packet's head that a relay of IP packets does not see
# What a line asks of the kernel, by the first of these words in it.
_PARTS = {
    "tbf": "sch_tbf", "congctl": "a congestion control by route",
    "netem": "sch_netem", "u32": "cls_u32", "police": "act_police", "htb": "sch_htb",
    "bridge": "a bridge", "veth": "a veth pair",
}  # fmt: skip
# Packets, while QUEUE is seconds: dropping is the policer's part, see _police.
_LIMIT = 1_000_000
_FREE = LinkRule(0, 0, 0.0)  # asks for nothing
_PORT = "port"  # of the hub


class Netem(Network):
    """A bridge, and a netem for each link that may get slow.

    `hub`: a descriptor of the bridge's network namespace; `port(i)` is its device towards host i.

    Args:
        namespaces: of the hosts, a descriptor each.
        pids: of the hosts, the processes in them.
        links: that may get slow.
        mtu: bytes of the largest packet.

    Raises:
        AdaptraError: the kernel, ip or tc refuses something.
    """

    def __init__(
        self,
        namespaces: Sequence[int],
        pids: Sequence[int],
        links: Sequence[Link],
        mtu: int = MTU,
    ) -> None:
        self._slots = {link: number for number, link in enumerate(dict.fromkeys(links), 1)}
        self._rules = dict.fromkeys(self._slots, _FREE)
        self.hub = new()
        try:
            devices = _bridge() + [
                line for i, p in enumerate(pids) for line in _wire(i, mtu, str(p))
            ]
            with entered(self.hub):
                batch("ip", devices)
            for host, namespace in enumerate(namespaces):
                with entered(namespace):
                    # Without IPv6, as across the relay: no way around the rules.
                    batch("ip", [f"link set dev {INTERFACE} addrgenmode none"])
                    bring_up(INTERFACE, address(host), mtu)
            with entered(self.hub):
                batch("tc", _classes(self._slots))
        except OSError as error:
            os.close(self.hub)
            raise AdaptraError(f"netem: a host's device cannot be set up: {error}") from None
        except AdaptraError:
            os.close(self.hub)
            raise

    @property
    def traffic(self) -> Traffic:
        """Return what the hub's ports have counted until now."""
        with entered(self.hub):
            ports = json.loads(_call("ip", "-s", "-j", "link", "show"))
            queues = json.loads(_call("tc", "-s", "-j", "qdisc", "show"))
        counts = [each["stats64"] for each in ports if each["ifname"].startswith(_PORT)]
        packets = sum(count["rx"]["packets"] for count in counts)
        return Traffic(
            packets=packets,
            bytes=sum(count["rx"]["bytes"] for count in counts) - _ETHERNET * packets,
            lost=sum(count["tx"]["dropped"] for count in counts)
            + sum(queue["drops"] for queue in queues if queue.get("root")),
        )

    def shape(self, rules: Mapping[Link, LinkRule]) -> None:
        """Make the links of `rules` slow, and all others healthy."""
        wanted = {link: rules.get(link, _FREE) for link in self._slots}
        changed = {link for link, rule in wanted.items() if rule != self._rules[link]}
        if not changed:
            return
        lines = []
        for link in sorted(changed):
            lines.append(f"qdisc change {_netem(link, wanted[link])}")
            lines.append(f"actions replace {_police(self._slots[link], wanted[link])}")
        with entered(self.hub):
            batch("tc", lines)
        self._rules = wanted

    def close(self) -> None:
        """Let the kernel remove the hub, its ports and their other ends."""
        os.close(self.hub)


def probe(slow: bool, more: Sequence[str] = ()) -> None:
    """Raise AdaptraError, which says what is missing, unless all that a rule may ask is here.

    `slow`: False without rules. `more`: lines that tc has to accept, of the device `port(0)`.
    """
    for program in ("ip", "tc"):
        _find(program)
    hub = new()
    try:
        with entered(hub):
            batch("ip", [*_bridge(), *_wire(0, MTU), *_wire(1, MTU)])
            batch("tc", more)
            if not slow:
                return
            batch("tc", _classes({(0, 1): 1}))
            batch("tc", [f"qdisc change {_netem((0, 1), LinkRule(0, 1, 1e-3, jitter=1e-4))}"])
    finally:
        os.close(hub)


def _bridge() -> list[str]:
    # It forwards at once, and sends no packets of its own.
    return [
        "link add name hub type bridge forward_delay 0 mcast_snooping 0",
        "link set dev hub addrgenmode none up",
    ]


def port(host: int) -> str:
    """The hub's device towards host number `host`."""
    return f"{_PORT}{host}"


def _wire(host: int, mtu: int, pid: str = "") -> list[str]:
    """Return lines that make the hub's port to a host, whose end is `eth0` at `pid`, or here."""
    end = f"name {INTERFACE} netns {pid}" if pid else f"name end{host}"
    size = f"mtu {mtu} txqueuelen {WAITING}"
    return [
        f"link add name {port(host)} {size} type veth peer {end} mtu {mtu}",
        f"link set dev {port(host)} master hub addrgenmode none up",
    ]


def _classes(slots: Mapping[Link, int]) -> list[str]:
    """Return lines for one class of packets per link; the htb classifies packets, and delays none.

    Of the kernel's classful queues htb alone takes this many classes, each with a queue that keeps
    its packets for a while. Packets of no class pass it.
    """
    lines = [f"qdisc add dev port{t} root handle 1: htb" for t in sorted({t for _, t in slots})]
    for (source, target), slot in slots.items():
        port, at = f"dev port{target}", f"1:{source + 1:x}"
        wide = f"rate {_UNLIMITED:.0f}bps burst 1mb cburst 1mb quantum {MTU}"
        lines += [
            f"class add {port} parent 1: classid {at} htb {wide}",
            f"qdisc add {_netem((source, target), _FREE)}",
            f"actions add {_police(slot, _FREE)}",
            f"filter add {port} parent 1: protocol ip pref {source + 1} "
            f"u32 match ip src {address(source)}/32 flowid {at} action police index {slot}",
        ]
    return lines


def _netem(link: Link, rule: LinkRule) -> str:
    """Return a netem line, always with a rate: only with one does netem keep packets in order."""
    source, target = link
    delay = f"delay {_us(rule.delay)}us"
    if rule.jitter:  # which netem takes only on top of a delay
        delay = f"delay {max(1, _us(rule.delay))}us {max(1, _us(rule.jitter))}us"
        delay += " distribution normal"
    loss = f" loss {100 * rule.loss:.6f}%" if rule.loss else ""
    rate = f"rate {_rate(rule):.0f}bps -{_ETHERNET}"
    at = f"dev port{target} parent 1:{source + 1:x} handle {0x100 + source:x}:"
    return f"{at} netem limit {_LIMIT} {delay}{loss} {rate}"


def _police(slot: int, rule: LinkRule) -> str:
    """Return the action that drops what exceeds QUEUE seconds; netem's limit counts packets.

    A bucket that fills at the link's rate and holds that much traffic is empty when such a queue
    is full.
    """
    rate = _rate(rule)
    bucket = min(max(MTU, rate * QUEUE), 4e9)  # a field of 32 bits
    return (
        f"action police rate {rate:.0f}bps burst {bucket:.0f} mtu 65535 "
        f"conform-exceed drop/ok index {slot}"
    )


def _rate(rule: LinkRule) -> float:
    return max(1.0, rule.bandwidth) if math.isfinite(rule.bandwidth) else _UNLIMITED


def _us(seconds: float) -> int:
    return round(1e6 * seconds)


def batch(program: str, lines: Sequence[str]) -> None:
    """Have `program`, ip or tc, run `lines` in this thread's namespace.

    Raises AdaptraError with the line that was refused.
    """
    if lines:
        _call(program, "-batch", "-", lines=lines)


def device(name: str) -> dict[str, Any]:
    """Return `ip`'s report on the device `name` in this thread's namespace. Raises AdaptraError."""
    [found] = json.loads(_call("ip", "-d", "-j", "link", "show", "dev", name))
    return dict(found)


def _find(program: str) -> str:
    if found := shutil.which(program, path=_PATH):
        return found
    raise AdaptraError(f"the program {program} is missing; the package iproute2 has it")


def _call(program: str, *words: str, lines: Sequence[str] = ()) -> str:
    text = "".join(f"{line}\n" for line in lines)
    try:
        done: Any = subprocess.run(
            [_find(program), *words], input=text, capture_output=True, text=True, timeout=_TIMEOUT,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise AdaptraError(f"{program} has not ended in {_TIMEOUT:g} s") from None
    if done.returncode == 0:
        return str(done.stdout)
    output = done.stderr.splitlines() or [f"status {done.returncode}"]
    number = output[-1].rpartition(":")[2]  # of "Command failed -:5"
    line = lines[int(number) - 1] if lines and number.isdigit() else " ".join(words)
    for kernel in ("Error: ", "RTNETLINK answers: "):
        if output[0].startswith(kernel):
            part = next((part for word, part in _PARTS.items() if f" {word} " in line), line)
            raise AdaptraError(
                f"the kernel refuses {part}: {output[0].removeprefix(kernel).rstrip('.')}"
            )
    raise AdaptraError(f"{program} does not take {line!r}: {output[0]}")
