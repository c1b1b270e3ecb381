"""Both ends of a connection over RoCE take addresses of one family, IPv4 or IPv6, or refuse it."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from fakes.controlled_cuda.gpu import until
from fakes.controlled_verbs.pair import Environ, Gids, Pair, indices, put, refusals
from fakes.controlled_verbs.verbs import DEVICES, Fabric, run
from patience import PATIENCE

from megatron_adaptra.errors import BadInput
from megatron_adaptra.transport.engine import events
from megatron_adaptra.transport.engine.addresses import Choice
from megatron_adaptra.transport.engine.bindings import ports
from megatron_adaptra.transport.engine.endpoint import CONNECTIONS, Endpoint
from megatron_adaptra.transport.engine.rails import Rail, disabled, fabric
from megatron_adaptra.transport.engine.rendezvous import FolderRendezvous

NAME = "NCCL_IB_ADDR_FAMILY"
V4, V6 = {NAME: "AF_INET"}, {NAME: "AF_INET6"}
LOCAL = {0: ("fe80::{}", 1), 1: ("fe80::{}", 2)}
OLD4, NEW4 = {2: ("::ffff:10.0.0.{}", 1)}, {3: ("::ffff:10.0.0.{}", 2)}
OLD6, NEW6 = {4: ("2001:db8::{}", 1)}, {5: ("2001:db8::{}", 2)}
BOTH = LOCAL | OLD4 | NEW4 | OLD6 | NEW6


def test_names_are_those_of_nccl() -> None:
    assert [fabric(environ).choice.family for environ in ({}, {NAME: ""}, V4, V6)] == [0, 0, 4, 6]
    for text in ("AF_INET4", "6", "af_inet"):
        with pytest.raises(BadInput) as refused:
            fabric({NAME: text})
        assert str(refused.value) == (
            f"{NAME} '{text}': it has to be AF_INET (IPv4) or AF_INET6 (IPv6)"
        )


def test_rdma_is_off_where_nccl_has_it_off() -> None:
    values = {"1": True, "2": True, " 0x1 ": True, "": False, "0": False, "00": False, "no": False}
    for text, expected in values.items():
        assert disabled({"NCCL_IB_DISABLE": text}) is expected, text
    assert not disabled({})


@pytest.mark.parametrize(
    ("gids", "environs", "expected"),
    [
        # As for NCCL: IPv4, of version 2, where both ends have it.
        ((BOTH, BOTH), ({}, {}), [3, 3]),
        ((BOTH, BOTH), (V4, {}), [3, 3]),
        # What the one names, or the only one that it has, is the other one's, too.
        ((BOTH, BOTH), (V6, {}), [5, 5]),
        ((BOTH, BOTH), ({}, V6), [5, 5]),
        ((BOTH, BOTH), (V6, V6), [5, 5]),
        ((BOTH, LOCAL | NEW6), ({}, {}), [5, 5]),
        ((LOCAL | NEW6, BOTH), ({}, {}), [5, 5]),
        ((BOTH, BOTH), ({"NCCL_IB_GID_INDEX": "5"}, {}), [5, 5]),
        ((BOTH, BOTH), ({}, {"NCCL_IB_GID_INDEX": "3"}), [3, 3]),
        # An index is a choice of its own, as for NCCL.
        ((BOTH, BOTH), ({"NCCL_IB_GID_INDEX": "3"} | V6, {}), [3, 3]),
        # A link-local address is one of IPv6.
        ((LOCAL | NEW4, LOCAL), ({}, {}), [1, 1]),
        # Version 2 comes first, whatever the family.
        ((LOCAL | OLD4 | NEW6, BOTH), ({}, {}), [5, 5]),
        ((OLD4 | OLD6, OLD4 | OLD6), ({}, {}), [2, 2]),
        ((OLD4 | OLD6, OLD6), ({}, {}), [4, 4]),
    ],
)
def test_both_ends_find_addresses_of_one_family(
    gids: tuple[Gids, Gids], environs: tuple[Environ, Environ], expected: list[int]
) -> None:
    assert run(indices, gids, environs) == expected


@pytest.mark.parametrize(
    ("gids", "environs"),
    [
        ((BOTH, BOTH), (V4, V6)),
        ((NEW4, NEW6), ({}, {})),
        ((BOTH, BOTH), ({"NCCL_IB_GID_INDEX": "3"}, {"NCCL_IB_GID_INDEX": "5"})),
    ],
)
def test_two_families_are_refused_with_both(
    gids: tuple[Gids, Gids], environs: tuple[Environ, Environ]
) -> None:
    end = f"one family for both is needed, see {NAME}"
    assert run(refusals, gids, environs) == [
        "no address of one family: IPv4 here, IPv6 there (10.0.0.1 at port 1 of made_up0, and "
        f"2001:db8::2); {end}",
        "no address of one family: IPv6 here, IPv4 there (2001:db8::2 at port 1 of made_up1, and "
        f"10.0.0.1); {end}",
    ]


def alone(fabric: Fabric) -> tuple[str, list[tuple[int, str]]]:
    put(fabric, LOCAL | NEW4, NEW4)
    pair = Pair({}, V6)
    with pytest.raises(RuntimeError) as refused:
        pair.opened(1)
    pair.close()
    shown = [port for of in (0, 4, 6) for port in ports(Choice(of))]
    return str(refused.value), [(port.gid_index, port.why) for port in shown]


def test_a_port_without_an_address_of_the_family_is_named() -> None:
    words, shown = run(alone)
    none = f"it has no GID of IPv6, which {NAME} names"
    assert words == f"port 1 of made_up1: {none}"
    named = f", of the family that {NAME} names"
    assert shown == [
        *[(3, "RoCE v2, IPv4")] * 2,
        *[(3, f"RoCE v2, IPv4{named}")] * 2,
        (1, f"RoCE v2, link-local{named}"),
        (-1, none),
    ]


def of_two_ranks(fabric: Fabric, families: tuple[int, int]) -> tuple[list[str], int]:
    """What is logged, and how many paths there are, between two ranks with rails of `families`."""
    put(fabric, BOTH, BOTH)
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder, patch.object(events, "log_line", lines.append):
        rendezvous = FolderRendezvous(Path(folder))
        ends = [
            Endpoint(rank, "127.0.0.1", str(rank), rendezvous, PATIENCE,
                     ports=[Rail(DEVICES[rank], 1, choice=Choice(families[rank]))])
            for rank in (0, 1)
        ]  # fmt: skip
        ends[1].connect([0])
        ends[0].connect([1])
        ends[1].open_rails(0)  # the higher rank dials
        one_family = 0 in families or len(set(families)) == 1
        paths = CONNECTIONS + one_family
        for rank, end in enumerate(ends):
            counts = partial(end.engine.counts, 1 - rank)
            until(lambda of=counts: of().paths == paths, "all paths are there")
        if not one_family:
            until(lambda: bool(lines), "it is logged")
        for end in ends:
            end.close()
    return lines, paths


@pytest.mark.parametrize("families", [(0, 0), (6, 0), (0, 6), (4, 6)])
def test_ranks_agree_or_do_without_the_rail(families: tuple[int, int]) -> None:
    lines, paths = run(of_two_ranks, families)
    assert paths == CONNECTIONS + (families != (4, 6))
    assert bool(lines) is (families == (4, 6))
    for line in lines:
        assert "no address of one family: IPv" in line
