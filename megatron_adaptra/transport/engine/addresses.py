"""Addresses of an RDMA port on Ethernet that messages may use, as NCCL's variables have it.

Numbers in these are read as NCCL reads them: 0x60 and 0140 are 96, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network

from megatron_adaptra.base.errors import BadInput

FAMILY, RANGE = "NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE"
VERSION = "NCCL_IB_ROCE_VERSION_NUM"
_FAMILIES = {"": 0, "AF_INET": 4, "AF_INET6": 6}
_MAPPED = int(IPv6Address("::ffff:0:0"))  # what a GID has before an address of IPv4


@dataclass(frozen=True)
class Choice:
    """A choice limits the addresses that a port may use where no index is named.

    Args:
        family: 4 or 6 of IP; 0 for either, as the other end has it.
        network: only addresses in it, if the port has some; None: any.
        version: 1 or 2 of RoCE; 0 for either, as the other end has it.
    """

    family: int = 0
    network: IPv4Network | IPv6Network | None = None
    version: int = 0

    def has(self, gid: bytes) -> bool:
        """Return whether `gid`, of 16 bytes, is in the network; no IPv6 network has IPv4 ones."""
        if self.network is None:
            return True
        address = IPv6Address(gid)
        if isinstance(self.network, IPv4Network):
            return address.ipv4_mapped is not None and address.ipv4_mapped in self.network
        return address.ipv4_mapped is None and address in self.network

    @property
    def words(self) -> tuple[int, int, bytes, int]:
        """The engine's form: family, version, how GIDs of the network begin, in how many bits."""
        if self.network is None:
            return self.family, self.version, b"", 0
        first, bits = int(self.network.network_address), self.network.prefixlen
        if isinstance(self.network, IPv4Network):
            first, bits = _MAPPED + first, 96 + bits
        return self.family, self.version, first.to_bytes(16, "big"), bits


ANY = Choice()


def choice(environ: Mapping[str, str]) -> Choice:
    """Return the Choice that `environ` asks for. A network that cannot be read is left out.

    Raises BadInput for an unknown family or version of RoCE. NCCL takes IPv4 and version 2 where
    none is named. So does the engine, unless one of two ports has no such address; other words that
    NCCL takes for AF_INET are refused.
    """
    name = environ.get(FAMILY, "").strip()
    if name not in _FAMILIES:
        raise BadInput(FAMILY, name, "it has to be AF_INET (IPv4) or AF_INET6 (IPv6)")
    version = number(environ, VERSION, 1, 2, 0)
    with suppress(BadInput):
        return Choice(_FAMILIES[name], _network(environ), version)
    return Choice(_FAMILIES[name], None, version)


def left_out(environ: Mapping[str, str]) -> str:
    """Why the network of `environ` cannot be read, or an empty string."""
    try:
        _network(environ)
    except BadInput as error:
        return str(error)
    return ""


def _network(environ: Mapping[str, str]) -> IPv4Network | IPv6Network | None:
    """Return the network of `environ`, or None; as in NCCL, bits beyond its length do not count."""
    text = environ.get(RANGE, "").strip()
    if not text:
        return None
    first, _, length = text.partition("/")
    if length.isascii() and length.isdecimal() and "%" not in first:
        for kind in (IPv4Network, IPv6Network):
            with suppress(ValueError):
                return kind((first, int(length)), strict=False)
    allowed = "it has to be one range of addresses, such as 10.1.0.0/16 or 2001:db8::/32"
    raise BadInput(RANGE, text, allowed)


def value(text: str) -> int | None:
    """Return the whole number that `text` stands for, or None."""
    octal = text.startswith("0") and text.isdecimal()
    with suppress(ValueError):
        return int(text, 8 if octal else 0)
    return None


def number(environ: Mapping[str, str], name: str, least: int, most: int, usual: int) -> int:
    """Return the number that `environ` has under `name`; `usual` where it is unset.

    Raises BadInput for any text but a whole number from `least` to `most`.
    """
    text = environ.get(name, "").strip()
    if not text:
        return usual
    found = value(text)
    if found is not None and least <= found <= most:
        return found
    raise BadInput(name, text, f"it has to be a whole number from {least} to {most}")
