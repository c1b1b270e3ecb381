"""NCCL_IB_ADDR_RANGE: of a port's addresses on Ethernet those of one network are taken, if any."""

from __future__ import annotations

import os
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from unittest.mock import patch

import pytest
from fakes.controlled_verbs.pair import Environ, Gids, Pair, indices, put
from fakes.controlled_verbs.verbs import INFINIBAND, Fabric, run

from megatron_adaptra.transport.engine import rails
from megatron_adaptra.transport.engine.addresses import ANY, Choice, choice, left_out
from megatron_adaptra.transport.engine.bindings import new_engine, ports

NAME, FAMILY = "NCCL_IB_ADDR_RANGE", "NCCL_IB_ADDR_FAMILY"
LOCAL = {0: ("fe80::{}", 1), 1: ("fe80::{}", 2)}
STORAGE = {2: ("::ffff:10.1.0.{}", 1), 3: ("::ffff:10.1.0.{}", 2)}
COMPUTE = {4: ("::ffff:10.2.0.{}", 1), 5: ("::ffff:10.2.0.{}", 2)}
SIX = {6: ("2001:db8:0:7::{}", 2)}
ALL = LOCAL | STORAGE | COMPUTE | SIX


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("10.1.0.0/16", IPv4Network("10.1.0.0/16")),
        # Bits behind the length do not count, as for NCCL.
        (" 10.1.2.3/16 ", IPv4Network("10.1.0.0/16")),
        ("0.0.0.0/0", IPv4Network("0.0.0.0/0")),
        ("10.1.2.3/32", IPv4Network("10.1.2.3/32")),
        ("2001:db8::/32", IPv6Network("2001:db8::/32")),
        ("::/0", IPv6Network("::/0")),
    ],
)
def test_ranges_are_read_as_nccl_reads_them(
    text: str, expected: IPv4Network | IPv6Network | None
) -> None:
    assert choice({NAME: text}) == Choice(0, expected)
    assert left_out({NAME: text}) == ""


@pytest.mark.parametrize(
    "text",
    ["10.1", "10.1.0.0", "10.1.0.0/33", "10.1.0.0/255.255.0.0", "2001:db8::/129", "10.1.0.0/-1",
     "10.1.0.0/16,10.2.0.0/16", "fe80::%eth0/64", "10.1.0.0/", "/16", "eth0", "10.1.0.0/1_6"],
)  # fmt: skip
def test_what_cannot_be_read_is_left_out_and_named(text: str) -> None:
    environ = {NAME: text, FAMILY: "AF_INET"}
    assert choice(environ) == Choice(4)
    assert left_out(environ) == (
        f"{NAME} '{text}': it has to be one range of addresses, such as 10.1.0.0/16 or "
        "2001:db8::/32"
    )


WITHIN, NONE = f", within {NAME}", f": none is within {NAME}"
NAMED = f", of the family that {FAMILY} names"


def at_each_length(fabric: Fabric, address: IPv4Address | IPv6Address) -> None:
    """One GID differs in the last bit that counts, another one in the first that does not."""
    kind, most = (IPv4Network, 32) if address.version == 4 else (IPv6Network, 128)

    def with_other(place: int) -> str:
        number = int(address) ^ (1 << most >> place if place else 0)
        return f"::ffff:{IPv4Address(number)}" if most == 32 else str(IPv6Address(number))

    for length in range(most + 1):
        which = Choice(0, kind((address, length), strict=False))
        outside, inside = with_other(length), with_other((length + 1) % (most + 1))
        fabric.gid(0, 0, outside if length else "fe80::1" if most == 32 else "::ffff:1.2.3.4")
        fabric.gid(0, 1, "::")
        (port, _) = ports(which)
        assert port.why.endswith(NONE), length
        assert not which.has(port.gid)
        fabric.gid(0, 1, inside)
        (port, _) = ports(which)
        assert (port.gid_index, port.why.endswith(WITHIN)) == (1, True), length
        assert which.has(port.gid)


@pytest.mark.parametrize("address", ["10.90.165.90", "2001:db8:5a5a:a5a5:5a5a:a5a5:5a5a:a5a5"])
def test_as_many_bits_count_as_the_range_has(address: str) -> None:
    run(at_each_length, ip_address(address))


def shown(fabric: Fabric, network: str, family: int) -> list[tuple[int, str]]:
    put(fabric, ALL, LOCAL | STORAGE)
    found = ports(Choice(family, choice({NAME: network}).network))
    return [(port.gid_index, port.why) for port in found]


@pytest.mark.parametrize(
    ("network", "family", "expected"),
    [
        ("", 0, [(3, "RoCE v2, IPv4"), (3, "RoCE v2, IPv4")]),
        ("10.1.0.0/16", 0, [(3, f"RoCE v2, IPv4{WITHIN}"), (3, f"RoCE v2, IPv4{WITHIN}")]),
        # Without any inside, the best one of the others.
        ("10.2.0.0/16", 0, [(5, f"RoCE v2, IPv4{WITHIN}"), (3, f"RoCE v2, IPv4{NONE}")]),
        ("10.1.0.1/32", 0, [(3, f"RoCE v2, IPv4{WITHIN}"), (3, f"RoCE v2, IPv4{NONE}")]),
        ("2001:db8::/61", 0, [(6, f"RoCE v2, IPv6{WITHIN}"), (3, f"RoCE v2, IPv4{NONE}")]),
        ("2001:db8::/62", 0, [(3, f"RoCE v2, IPv4{NONE}"), (3, f"RoCE v2, IPv4{NONE}")]),
        ("fe80::/10", 0, [(1, f"RoCE v2, link-local{WITHIN}")] * 2),
        # All of one family are not all.
        ("0.0.0.0/0", 6, [(6, f"RoCE v2, IPv6{NAMED}{NONE}"),
                          (1, f"RoCE v2, link-local{NAMED}{NONE}")]),
        ("::/0", 0, [(6, f"RoCE v2, IPv6{WITHIN}"), (1, f"RoCE v2, link-local{WITHIN}")]),
        ("::/0", 4, [(3, f"RoCE v2, IPv4{NAMED}{NONE}")] * 2),
        ("10.2.0.0/15", 4, [(5, f"RoCE v2, IPv4{NAMED}{WITHIN}"),
                            (3, f"RoCE v2, IPv4{NAMED}{NONE}")]),
    ],
)  # fmt: skip
def test_addresses_within_the_range_are_preferred(
    network: str, family: int, expected: list[tuple[int, str]]
) -> None:
    assert run(shown, network, family) == expected


@pytest.mark.parametrize(
    ("gids", "environs", "expected"),
    [
        ((ALL, ALL), ({}, {}), [3, 3]),
        ((ALL, ALL), ({NAME: "10.2.0.0/16"}, {NAME: "10.2.0.0/16"}), [5, 5]),
        ((ALL, ALL), ({NAME: "2001:db8::/32"}, {}), [6, 6]),
        ((ALL, ALL), ({}, {NAME: "2001:db8::/32"}), [6, 6]),
        ((ALL, LOCAL | STORAGE), ({NAME: "10.2.0.0/16"}, {NAME: "10.2.0.0/16"}), [5, 3]),
        # An index is a choice of its own, and what cannot be read is none.
        ((ALL, ALL), ({NAME: "10.2.0.0/16", "NCCL_IB_GID_INDEX": "3"}, {}), [3, 3]),
        ((ALL, ALL), ({NAME: "10.2"}, {NAME: "10.2"}), [3, 3]),
    ],
)
def test_a_connection_is_between_addresses_within_the_range(
    gids: tuple[Gids, Gids],
    environs: tuple[Environ, Environ],
    expected: list[int],
) -> None:
    assert run(indices, gids, environs) == expected


def taken(fabric: Fabric) -> list[int]:
    """While the link was down, and after a connection was opened anew."""
    put(fabric, LOCAL | STORAGE, LOCAL | STORAGE)
    pair = Pair({NAME: "10.2.0.0/16"})
    found = []
    for _ in range(2):
        pair.connected()
        found.append(fabric.changes()[-2].gid_index)
        put(fabric, COMPUTE, COMPUTE)
    pair.close()
    return found


def test_an_address_within_the_range_is_taken_once_it_is_there() -> None:
    assert run(taken) == [3, 5]


def lines(fabric: Fabric, link: int, network: str, speaks: bool) -> list[str]:
    put(fabric, ALL, ALL)
    for device in (0, 1):
        fabric.port(device, link)
    written: list[str] = []
    with patch.dict(os.environ, {NAME: network}), patch.object(rails, "log_line", written.append):
        found = rails.rails(speaks=speaks)
    assert [rail.choice for rail in found] == [choice({NAME: network})] * 2
    return written


@pytest.mark.parametrize("speaks", [True, False])
def test_one_line_names_a_range_that_is_left_out(speaks: bool) -> None:
    line = f"{left_out({NAME: '10.2'})}; training goes on without it"
    assert run(lines, 2, "10.2", speaks) == [line] * speaks
    assert run(lines, 2, "10.2.0.0/16", speaks) == []
    assert run(lines, INFINIBAND, "10.2", speaks) == [], "no range has a meaning there"


def sizes(fabric: Fabric) -> list[str]:
    put(fabric, ALL, ALL)
    engine = new_engine(1 << 20, 1 << 20, 5.0)
    engine.add_peer(0, "rank 0")
    refused = []
    for network, bits in ((b"x" * 15, 8), (b"x" * 16, 129), (b"x" * 16, -1)):
        with pytest.raises(ValueError, match=r"bytes and .* bits") as why:
            engine.open_verbs(0, "made_up0", 1, -1, 0, 0, network, bits, 0, 0, 0, 16, 6, 1)
        refused.append(str(why.value))
    engine.open_verbs(0, "made_up0", 1, -1, *ANY.words, 0, 0, 0, 16, 6, 1)
    engine.close("the test is over")
    return refused


def test_the_engine_takes_no_other_size_of_a_network() -> None:
    assert run(sizes) == [
        "a network of 15 bytes and 8 bits",
        "a network of 16 bytes and 129 bits",
        "a network of 16 bytes and -1 bits",
    ]
