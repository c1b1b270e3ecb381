"""Both ends of a connection over RoCE take addresses for one version of it, or refuse it."""

from __future__ import annotations

import itertools
import random

import pytest
from fakes.controlled_verbs.pair import RECEIVES, Environ, Gids, Pair, indices, put, refusals
from fakes.controlled_verbs.verbs import Fabric, run

from megatron_adaptra.errors import BadInput
from megatron_adaptra.transport.engine.addresses import VERSION, Choice
from megatron_adaptra.transport.engine.bindings import ports
from megatron_adaptra.transport.engine.rails import fabric

ONE, TWO = {VERSION: "1"}, {VERSION: "2"}
FAMILY, INDEX = "NCCL_IB_ADDR_FAMILY", "NCCL_IB_GID_INDEX"
SCOPES = ("::ffff:10.0.0.{}", "2001:db8::{}", "fe80::{}")
# By kind: of IPv4, IPv6 and of the link for version 2, then for version 1, each at its own index.
KINDS: list[Gids] = [
    {kind: (SCOPES[kind % 3], 2 if kind < 3 else 1)} for kind in range(2 * len(SCOPES))
]
NEW4, NEW6, NEWLOCAL, OLD4, OLD6, OLDLOCAL = KINDS
# As an interface has them: each address for both versions.
V4, V6, LOCAL = NEW4 | OLD4, NEW6 | OLD6, NEWLOCAL | OLDLOCAL
ALL = V4 | V6 | LOCAL
ANY: Environ = {}


def test_the_version_is_read_as_nccl_reads_it() -> None:
    texts = {"": 0, "1": 1, "2": 2, " 0x2 ": 2}
    assert {text: fabric({VERSION: text}).choice.version for text in texts} == texts
    assert fabric({}).choice.version == 0
    for text in ("0", "3", "v2", "2.0"):
        with pytest.raises(BadInput) as refused:
            fabric({VERSION: text})
        expected = f"{VERSION} '{text}': it has to be a whole number from 1 to 2"
        assert str(refused.value) == expected


@pytest.mark.parametrize(
    ("gids", "environs", "expected"),
    [
        ((ALL, ALL), (ANY, ANY), [0, 0]),
        ((ALL, ALL), (TWO, ANY), [0, 0]),
        # What the one names, or the only one that it has, is the other one's, too.
        ((ALL, ALL), (ONE, ANY), [3, 3]),
        ((ALL, ALL), (ANY, ONE), [3, 3]),
        ((ALL, ALL), (ONE, ONE), [3, 3]),
        ((ALL, OLD4 | OLDLOCAL), (ANY, ANY), [3, 3]),
        ((OLDLOCAL, ALL), (ANY, ANY), [5, 5]),
        ((ALL, ALL), ({INDEX: "3"}, ANY), [3, 3]),
        ((ALL, ALL), (ANY, {INDEX: "5"}), [5, 5]),
        # Version 2 of another family before version 1 of the same.
        ((V4 | LOCAL, OLD4 | NEWLOCAL), (ANY, ANY), [2, 2]),
        ((ALL, V6 | OLD4), (ANY, ANY), [1, 1]),
        # Family and version together.
        ((ALL, ALL), (ONE, {FAMILY: "AF_INET6"}), [4, 4]),
        ((ALL, ALL), (TWO | {FAMILY: "AF_INET6"}, ANY), [1, 1]),
        # An index is a choice of its own, as for NCCL.
        ((ALL, ALL), (ONE | {INDEX: "0"}, ANY), [0, 0]),
        # Link-local with link-local, and only else with what reaches further.
        ((V6 | LOCAL, LOCAL), (ANY, ANY), [2, 2]),
        ((LOCAL, V6 | LOCAL), ({INDEX: "2"}, ANY), [2, 2]),
        ((V6, LOCAL), (ANY, ANY), [1, 2]),
        ((LOCAL, OLD6), (ANY, ANY), [5, 4]),
    ],
)
def test_both_ends_find_addresses_for_one_version(
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
    for of_ends in random.Random(5).sample(of_both, 300):
        put(fabric, nothing, nothing)
        put(fabric, *({kind: KINDS[kind][kind] for kind in kinds} for kinds in of_ends))
        before, pair = len(fabric.changes()), Pair(ANY)
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
        ((ALL, ALL), (TWO, ONE), "version of RoCE", ("v2", "v1"), VERSION),
        ((NEW4, OLD4), (ANY, ANY), "version of RoCE", ("v2", "v1"), VERSION),
        ((ALL, ALL), ({INDEX: "0"}, ONE), "version of RoCE", ("v2", "v1"), VERSION),
        ((V4, OLD6), (ONE, ANY), "family", ("IPv4", "IPv6"), FAMILY),
        (
            (NEW4 | OLD6, OLD4 | NEW6), (ANY, ANY),
            "family and version of RoCE", ("IPv4 v2", "IPv6 v2"), f"{FAMILY} and {VERSION}",
        ),
    ],
)  # fmt: skip
def test_two_versions_are_refused_with_both(
    gids: tuple[Gids, Gids],
    environs: tuple[Environ, Environ],
    what: str,
    words: tuple[str, str],
    variables: str,
) -> None:
    address = {"IPv6": "2001:db8::{}"}
    first, second = (
        address.get(word.split()[0], "10.0.0.{}").format(n) for n, word in enumerate(words, 1)
    )
    here, there = words
    end = f"one {what} {END} {variables}"
    assert run(refusals, gids, environs) == [
        f"no address of one {what}: {here} here, {there} there "
        f"({first} at port 1 of made_up0, and {second}); {end}",
        f"no address of one {what}: {there} here, {here} there "
        f"({second} at port 1 of made_up1, and {first}); {end}",
    ]


def alone(fabric: Fabric) -> tuple[list[str], list[tuple[int, str]]]:
    put(fabric, OLD4, LOCAL)
    refused = []
    for environ in (TWO, TWO | {FAMILY: "AF_INET"}):
        pair = Pair(environ)
        with pytest.raises(RuntimeError) as why:
            pair.opened(0)
        refused.append(str(why.value))
        pair.close()
    shown = [port for version in (0, 1, 2) for port in ports(Choice(version=version))]
    return refused, [(port.gid_index, port.why) for port in shown]


def test_a_port_without_an_address_for_the_version_is_named() -> None:
    refused, shown = run(alone)
    none = f"it has no GID of RoCE v2, which {VERSION} names"
    assert refused == [
        f"port 1 of made_up0: {none}",
        f"port 1 of made_up0: it has no GID of IPv4 and RoCE v2, which {FAMILY} and {VERSION} name",
    ]
    named = f", of the version that {VERSION} names"
    assert shown == [
        (3, "RoCE v1, IPv4: no v2 is there"),
        (2, "RoCE v2, link-local: the port has no other address"),
        (3, f"RoCE v1, IPv4{named}"),
        (5, f"RoCE v1, link-local{named}"),
        (-1, none),
        (2, f"RoCE v2, link-local{named}"),
    ]
