"""The choice of the network that joins the hosts: the kernel's netem, or else our relay."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_adaptra.base.errors import AdaptraError, BadInput
from megatron_adaptra.netlab import netem
from megatron_adaptra.netlab.loop import Loop
from megatron_adaptra.netlab.netem import Netem
from megatron_adaptra.netlab.network import Link, Network
from megatron_adaptra.netlab.ports import Ports
from megatron_adaptra.netlab.ports import probe as probe_ports
from megatron_adaptra.netlab.relay import Relay

SHAPERS = ("auto", "netem", "relay")


def choose(shaper: str, slow: bool = True, ports: bool = False) -> tuple[str, str]:
    """Choose `netem` or `relay`, and give the reason against netem, for a `shaper` of SHAPERS.

    Where no link is to be `slow` a kernel without netem will do, as its bridge joins the hosts.
    `ports`: hosts have rates, which only the kernel can keep.

    Raises AdaptraError where netem is required but not possible; BadInput for another shaper.
    """
    if shaper not in SHAPERS:
        raise BadInput("--shaper", shaper, f"it has to be one of {', '.join(SHAPERS)}")
    if ports and slow:
        raise AdaptraError(
            "a laboratory has slow links (--link) or rates of hosts (--host), not both"
        )
    if shaper == "relay":
        if ports:
            raise AdaptraError("--shaper relay cannot keep rates of hosts (--host)")
        return "relay", ""
    try:
        if ports:
            probe_ports()
        else:
            netem.probe(slow)
    except (AdaptraError, OSError) as error:
        if ports:
            raise AdaptraError(f"rates of hosts (--host) cannot be kept here: {error}") from None
        if shaper == "netem":
            raise AdaptraError(
                f"--shaper netem cannot be used here: {error}; --shaper relay works without netem"
            ) from None
        return "relay", str(error)
    return "netem", ""


def build(
    shaper: str,
    namespaces: Sequence[int],
    pids: Sequence[int],
    links: Sequence[Link],
    loop: Loop,
    seed: int,
    ports: bool = False,
    delay: float = 0.0,
) -> Network:
    """Join the hosts: host i has network namespace `namespaces[i]` and is process `pids[i]`.

    `shaper`: netem or relay. `links`: those that may get slow. `seed`: of a relay's jitter, loss.
    `ports`: the network is to be a `Ports`, and each host `delay` seconds from each other one.
    """
    if ports:
        return Ports(namespaces, pids, delay)
    if shaper == "netem":
        return Netem(namespaces, pids, links)
    return Relay(namespaces, loop, seed)
