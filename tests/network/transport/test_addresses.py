"""Which address a connection over RoCE is between: by family, version and range, as for NCCL."""

from __future__ import annotations

import itertools
import os
import random
from ipaddress import IPv4Network, IPv6Network
from unittest.mock import patch

import pytest
from fakes.controlled_verbs.pair import (
    RECEIVES,
    Environ,
    Gids,
    Pair,
    indices,
    put,
    refusals,
    two_ranks,
)
from fakes.controlled_verbs.verbs import DEVICES, INFINIBAND, Fabric, run

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.transport.engine import rails
from megatron_adaptra.transport.engine.addresses import ANY, VERSION, Choice, choice, left_out
from megatron_adaptra.transport.engine.bindings import ports
from megatron_adaptra.transport.engine.rails import Rail, disabled, fabric

FAMILY, INDEX, RANGE = "NCCL_IB_ADDR_FAMILY", "NCCL_IB_GID_INDEX", "NCCL_IB_ADDR_RANGE"
ONE, TWO = {VERSION: "1"}, {VERSION: "2"}
V4, V6 = {FAMILY: "AF_INET"}, {FAMILY: "AF_INET6"}
NO: Environ = {}
SCOPES = ("::ffff:10.1.0.{}", "2001:db8:0:7::{}", "fe80::{}")
# By kind: of IPv4, IPv6 and of the link for version 2, then for version 1, each at its own index.
KINDS: list[Gids] = [
    {kind: (SCOPES[kind % 3], 2 if kind < 3 else 1)} for kind in range(2 * len(SCOPES))
]
NEW4, NEW6, NEWLOCAL, OLD4, OLD6, OLDLOCAL = KINDS
# As an interface has them: each address for both versions.
IPV4, IPV6, LOCAL = NEW4 | OLD4, NEW6 | OLD6, NEWLOCAL | OLDLOCAL
COMPUTE: Gids = {6: ("::ffff:10.2.0.{}", 2)}
ALL = IPV4 | IPV6 | LOCAL
BOTH = {RANGE: "10.2.0.0/16"}


def test_names_are_those_of_nccl() -> None:
    assert [fabric(e)[1].family for e in (NO, {FAMILY: ""}, V4, V6)] == [0, 0, 4, 6]
    texts = {"": 0, "1": 1, "2": 2, " 0x2 ": 2}
    assert {text: fabric({VERSION: text})[1].version for text in texts} == texts
    for name, wrong, must in (
        (FAMILY, ("AF_INET4", "6", "af_inet"), "AF_INET (IPv4) or AF_INET6 (IPv6)"),
        (VERSION, ("0", "3", "v2", "2.0"), "a whole number from 1 to 2"),
    ):
        for text in wrong:
            with pytest.raises(BadInput) as refused:
                fabric({name: text})
            assert str(refused.value) == f"{name} '{text}': it has to be {must}"
    values = {"1": True, "2": True, " 0x1 ": True, "": False, "0": False, "00": False, "no": False}
    assert {text: disabled({"NCCL_IB_DISABLE": text}) for text in values} == values
    assert not disabled(NO)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        # Bits behind the length do not count, as for NCCL.
        (" 10.1.2.3/16 ", IPv4Network("10.1.0.0/16")),
        ("0.0.0.0/0", IPv4Network("0.0.0.0/0")),
        ("2001:db8::/32", IPv6Network("2001:db8::/32")),
        ("::/0", IPv6Network("::/0")),
    ],
)
def test_ranges_are_read_as_nccl_reads_them(
    text: str, expected: IPv4Network | IPv6Network | None
) -> None:
    assert choice({RANGE: text}) == Choice(0, expected)
    assert left_out({RANGE: text}) == ""


@pytest.mark.parametrize(
    "text",
    ["10.1", "10.1.0.0", "10.1.0.0/33", "10.1.0.0/255.255.0.0", "2001:db8::/129", "10.1.0.0/-1",
     "10.1.0.0/16,10.2.0.0/16", "fe80::%eth0/64", "10.1.0.0/", "/16", "eth0", "10.1.0.0/1_6"],
)  # fmt: skip
def test_a_range_that_cannot_be_read_is_left_out_and_named(text: str) -> None:
    environ = {RANGE: text} | V4
    assert choice(environ) == Choice(4)
    assert left_out(environ) == (
        f"{RANGE} '{text}': it has to be one range of addresses, such as 10.1.0.0/16 or "
        "2001:db8::/32"
    )


@pytest.mark.parametrize(
    ("gids", "environs", "expected"),
    [
        ((ALL, ALL), (NO, NO), [0, 0]),
        # What the one names is the other one's, too.
        ((ALL, ALL), (V4, NO), [0, 0]),
        ((ALL, ALL), (V6, NO), [1, 1]),
        ((ALL, ALL), (NO, V6), [1, 1]),
        ((ALL, ALL), (ONE, NO), [3, 3]),
        ((ALL, ALL), (NO, ONE), [3, 3]),
        ((ALL, ALL), (ONE, V6), [4, 4]),
        ((ALL, ALL), (TWO | V6, NO), [1, 1]),
        ((ALL, ALL), ({RANGE: "2001:db8::/32"}, NO), [1, 1]),
        ((ALL, ALL), (NO, {RANGE: "2001:db8::/32"}), [1, 1]),
        ((ALL | COMPUTE, ALL | COMPUTE), (BOTH, BOTH), [6, 6]),
        ((ALL | COMPUTE, ALL), (BOTH, BOTH), [6, 0]),
        # An index is a choice of its own, as for NCCL, and what cannot be read is none.
        ((ALL, ALL), ({INDEX: "3"}, NO), [3, 3]),
        ((ALL, ALL), (NO, {INDEX: "5"}), [5, 5]),
        ((ALL, ALL), ({INDEX: "0"} | ONE | V6 | BOTH, NO), [0, 0]),
        ((ALL, ALL), ({RANGE: "10.2"}, {RANGE: "10.2"}), [0, 0]),
        ((LOCAL, IPV6 | LOCAL), ({INDEX: "2"}, NO), [2, 2]),
    ],
)
def test_both_ends_find_addresses_that_meet(
    gids: tuple[Gids, Gids], environs: tuple[Environ, Environ], expected: list[int]
) -> None:
    assert run(indices, gids, environs) == expected


def meets(one: set[int], other: set[int]) -> tuple[int, int] | None:
    """The kinds by which ends that have these meet: the first that both have, else two of IPv6."""
    if both := one & other:
        return min(both), min(both)
    beyond = [(1, 2), (2, 1), (4, 5), (5, 4)]
    return next(((a, b) for a, b in beyond if a in one and b in other), None)


def every_two(fabric: Fabric) -> None:
    """Ports with any kinds: what the one end finds is what the other end finds."""
    numbers = range(len(KINDS))
    subsets = [{kind for kind in numbers if 1 << kind & bits} for bits in range(1, 1 << len(KINDS))]
    nothing: Gids = dict.fromkeys(numbers, ("::", 2))
    of_both = list(itertools.product(subsets, subsets))
    for of_ends in random.Random(5).sample(of_both, 120):
        put(fabric, nothing, nothing)
        put(fabric, *({kind: KINDS[kind][kind] for kind in kinds} for kinds in of_ends))
        before, pair = len(fabric.changes()), Pair(NO)
        expected = meets(*of_ends)
        if expected is None:
            assert all("no address of one" in words for words in pair.refused()), of_ends
        else:
            pair.connected()
            ends = [change for change in fabric.changes()[before:] if change.state == RECEIVES]
            assert tuple(end.gid_index for end in ends) == expected, of_ends
        pair.close()


@pytest.mark.long
def test_every_two_ports_agree_or_refuse() -> None:
    run(every_two)


END = "for both is needed, see"


@pytest.mark.parametrize(
    ("gids", "environs", "what", "words", "variables"),
    [
        ((ALL, ALL), (V4, V6), "family", ("IPv4", "IPv6"), FAMILY),
        ((ALL, ALL), (TWO, ONE), "version of RoCE", ("v2", "v1"), VERSION),
        ((ALL, ALL), ({INDEX: "0"}, ONE), "version of RoCE", ("v2", "v1"), VERSION),
        ((IPV4, OLD6), (ONE, NO), "family", ("IPv4", "IPv6"), FAMILY),
        (
            (NEW4 | OLD6, OLD4 | NEW6), (NO, NO),
            "family and version of RoCE", ("IPv4 v2", "IPv6 v2"), f"{FAMILY} and {VERSION}",
        ),
    ],
)  # fmt: skip
def test_what_does_not_meet_is_refused_with_both(
    gids: tuple[Gids, Gids],
    environs: tuple[Environ, Environ],
    what: str,
    words: tuple[str, str],
    variables: str,
) -> None:
    address = {"IPv6": "2001:db8:0:7::{}"}
    first, second = (
        address.get(word.split()[0], "10.1.0.{}").format(n) for n, word in enumerate(words, 1)
    )
    here, there = words
    end = f"one {what} {END} {variables}"
    assert run(refusals, gids, environs) == [
        f"no address of one {what}: {here} here, {there} there "
        f"({first} at port 1 of made_up0, and {second}); {end}",
        f"no address of one {what}: {there} here, {here} there "
        f"({second} at port 1 of made_up1, and {first}); {end}",
    ]


def alone(fabric: Fabric) -> list[str]:
    put(fabric, OLD4, LOCAL)
    refused = []
    for environ in (TWO, V6, TWO | V4):
        pair = Pair(environ)
        with pytest.raises(RuntimeError, match="port 1 of made_up0: it has no GID of") as why:
            pair.opened(0)
        refused.append(str(why.value).partition("no GID of ")[2])
        pair.close()
    return refused


def test_a_port_without_such_an_address_is_named() -> None:
    assert run(alone) == [
        f"RoCE v2, which {VERSION} names",
        f"IPv6, which {FAMILY} names",
        f"IPv4 and RoCE v2, which {FAMILY} and {VERSION} name",
    ]


def shown(fabric: Fabric, gids: tuple[Gids, Gids], which: Choice) -> list[tuple[int, str]]:
    put(fabric, *gids)
    return [(port.gid_index, port.why) for port in ports(which)]


def within(network: str, family: int = 0) -> Choice:
    return Choice(family, choice({RANGE: network}).network)


INSIDE, NONE = f", within {RANGE}", f": none is within {RANGE}"
OF_FAMILY, OF_VERSION = (f", of the {w} that {v} names"
                         for w, v in (("family", FAMILY), ("version", VERSION)))  # fmt: skip
TWO_NETS: tuple[Gids, Gids] = (ALL | COMPUTE, IPV4 | LOCAL)


@pytest.mark.parametrize(
    ("gids", "which", "expected"),
    [
        (TWO_NETS, ANY, ["0 RoCE v2, IPv4", "0 RoCE v2, IPv4"]),
        (TWO_NETS, Choice(6), [f"1 RoCE v2, IPv6{OF_FAMILY}", f"2 RoCE v2, link-local{OF_FAMILY}"]),
        ((OLD4, LOCAL), ANY, ["3 RoCE v1, IPv4: no v2 is there",
                              "2 RoCE v2, link-local: the port has no other address"]),
        ((OLD4, LOCAL), Choice(version=1), [f"3 RoCE v1, IPv4{OF_VERSION}",
                                            f"5 RoCE v1, link-local{OF_VERSION}"]),
        ((OLD4, LOCAL), Choice(version=2), [f"-1 it has no GID of RoCE v2, which {VERSION} names",
                                            f"2 RoCE v2, link-local{OF_VERSION}"]),
        # Without any inside, the best one of the others.
        (TWO_NETS, within("10.2.0.0/16"), [f"6 RoCE v2, IPv4{INSIDE}", f"0 RoCE v2, IPv4{NONE}"]),
        (TWO_NETS, within("2001:db8::/61"), [f"1 RoCE v2, IPv6{INSIDE}", f"0 RoCE v2, IPv4{NONE}"]),
        (TWO_NETS, within("2001:db8::/62"), [f"0 RoCE v2, IPv4{NONE}"] * 2),
        # All of one family are not all.
        (TWO_NETS, within("0.0.0.0/0", 6), [f"1 RoCE v2, IPv6{OF_FAMILY}{NONE}",
                                            f"2 RoCE v2, link-local{OF_FAMILY}{NONE}"]),
        (TWO_NETS, within("::/0"), [f"1 RoCE v2, IPv6{INSIDE}", f"2 RoCE v2, link-local{INSIDE}"]),
    ],
)  # fmt: skip
def test_an_address_is_shown_with_the_reason_for_it(
    gids: tuple[Gids, Gids], which: Choice, expected: list[str]
) -> None:
    assert [f"{index} {why}" for index, why in run(shown, gids, which)] == expected


def taken(fabric: Fabric) -> list[int]:
    """While the link was down, and after a connection was opened anew."""
    put(fabric, IPV4, IPV4)
    pair = Pair(BOTH)
    found = []
    for _ in range(2):
        pair.connected()
        found.append(fabric.changes()[-2].gid_index)
        put(fabric, COMPUTE, COMPUTE)
    pair.close()
    return found


def test_an_address_within_the_range_is_taken_once_it_is_there() -> None:
    assert run(taken) == [0, 6]


def lines(fabric: Fabric, link: int, network: str, speaks: bool) -> list[str]:
    put(fabric, ALL, ALL)
    for device in (0, 1):
        fabric.port(device, link)
    written: list[str] = []
    with patch.dict(os.environ, {RANGE: network}), patch.object(rails, "log_line", written.append):
        found = rails.rails(speaks=speaks)
    assert [rail.choice for rail in found] == [choice({RANGE: network})] * 2
    return written


@pytest.mark.parametrize("speaks", [True, False])
def test_one_line_names_a_range_that_is_left_out(speaks: bool) -> None:
    line = f"{left_out({RANGE: '10.2'})}; training goes on without it"
    assert run(lines, 2, "10.2", speaks) == [line] * speaks
    assert run(lines, 2, "10.2.0.0/16", speaks) == []
    assert run(lines, INFINIBAND, "10.2", speaks) == [], "no range has a meaning there"


def of_two_ranks(fabric: Fabric, families: tuple[int, int]) -> list[str]:
    put(fabric, ALL, ALL)
    own = [Rail(DEVICES[rank], 1, choice=Choice(families[rank])) for rank in (0, 1)]
    with two_ranks(own, families != (4, 6)) as (_, written):
        pass
    return written


@pytest.mark.parametrize("families", [(0, 6), (4, 6)])
def test_ranks_agree_or_do_without_the_rail(families: tuple[int, int]) -> None:
    written = run(of_two_ranks, families)
    assert bool(written) is (families == (4, 6))
    assert all("no address of one family: IPv" in line for line in written)
