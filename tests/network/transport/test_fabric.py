"""How packets are carried by a fabric: NCCL's variables, and what queue pairs are changed to."""

from __future__ import annotations

import ctypes
from dataclasses import astuple

import pytest
from fakes.controlled_cuda.gpu import until
from fakes.controlled_verbs.pair import IPV4, Pair, changed, put, two_ranks
from fakes.controlled_verbs.verbs import DEVICES, GRH_REQUIRED, INFINIBAND, Change, Fabric, run
from patience import PATIENCE

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.transport.engine.addresses import ANY
from megatron_adaptra.transport.engine.rails import Rail, Service, fabric

# Of ibv_modify_qp: which values are set.
PARTITION, ADDRESS, TIMEOUT, RETRIES = 1 << 4, 1 << 7, 1 << 9, 1 << 10
ENVIRON = {
    "NCCL_IB_TC": "106",
    "NCCL_IB_SL": "3",
    "NCCL_IB_PKEY": "2",
    "NCCL_IB_TIMEOUT": "22",
    "NCCL_IB_RETRY_CNT": "7",
    "NCCL_IB_QPS_PER_CONNECTION": "4",
}


def test_numbers_are_read_as_nccl_reads_them() -> None:
    assert fabric({}) == (-1, ANY, Service(0, 0, 0, 16, 6, 1))
    assert fabric(ENVIRON) == (-1, ANY, Service(106, 3, 2, 22, 7, 4))
    assert fabric(ENVIRON | {"NCCL_IB_TC": "0x60", "NCCL_IB_SL": "010"})[2].traffic_class == 96
    assert fabric({"NCCL_IB_SL": "010"})[2].level == 8
    assert fabric({"NCCL_IB_TC": "", "NCCL_IB_GID_INDEX": " 3 "}) == (3, ANY, Service())
    assert fabric({"NCCL_IB_GID_INDEX": "-1"})[0] == -1
    ends = {"TC": (0, 255), "SL": (0, 15), "PKEY": (0, 65535), "TIMEOUT": (0, 31)}
    ends |= {"RETRY_CNT": (0, 7), "GID_INDEX": (-1, 255), "QPS_PER_CONNECTION": (1, 128)}
    for name, (least, most) in ends.items():
        for value in (least, most):
            gid, _, service = fabric({f"NCCL_IB_{name}": str(value)})
            assert value in (gid, *astuple(service))
        for value in (least - 1, most + 1):
            with pytest.raises(BadInput) as refused:
                fabric({f"NCCL_IB_{name}": str(value)})
            assert str(refused.value) == (
                f"NCCL_IB_{name} '{value}': it has to be a whole number from {least} to {most}"
            )


@pytest.mark.parametrize("text", ["x", "1.5", "08", "0x", "1e1", "--1"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"NCCL_IB_TIMEOUT .*whole number from 0 to 31"):
        fabric({"NCCL_IB_TIMEOUT": text})


def roce(fabric: Fabric) -> tuple[list[Change], list[Change], bytes]:
    for device in (0, 1):
        fabric.port(device, keys=4)
        gid = fabric.gid(device, 3, IPV4.format(device + 1))
    index = {"NCCL_IB_GID_INDEX": "3"}
    return changed(fabric, index), changed(fabric, ENVIRON | index), gid


def test_queue_pairs_carry_the_values() -> None:
    usual, named, gid = run(roce)
    assert all(c.which & PARTITION for c in (usual[0], named[0]))
    assert (usual[0].partition, named[0].partition) == (0, 2)
    assert all(c.which & ADDRESS for c in (usual[2], named[2]))
    assert (usual[2].traffic_class, named[2].traffic_class) == (0, 106)
    assert (usual[2].level, named[2].level) == (0, 3)
    assert all(c.which & TIMEOUT and c.which & RETRIES for c in (usual[3], named[3]))
    assert (usual[3].timeout, usual[3].retries) == (16, 6)
    assert (named[3].timeout, named[3].retries) == (22, 7)
    for change in (usual[2], named[2]):
        assert (change.is_global, change.gid_index, change.gid) == (1, 3, gid)
        assert change.hops > 1


def of_infiniband(
    fabric: Fabric, here: dict[int, str], there: dict[int, str], flags: int
) -> tuple[Change, bytes]:
    """How the first end reaches the second."""
    for device, gids in enumerate((here, there)):
        fabric.port(device, INFINIBAND, flags, lid=70 + device)
        for index, address in gids.items():
            raw = fabric.gid(device, index, address)
    return changed(fabric, {"NCCL_IB_TC": "8", "NCCL_IB_SL": "5"})[2], raw


@pytest.mark.parametrize(
    ("here", "there", "flags", "is_global", "dlid", "index"),
    [
        # Within a subnet the local address is enough, unless the port always wants a global one.
        ({0: "fe80::1"}, {0: "fe80::2"}, 0, 0, 71, 0),
        ({0: "fe80::1"}, {0: "fe80::2"}, GRH_REQUIRED, 1, 71, 0),
        # Two subnets by their prefixes, as an administrator has set them.
        ({0: "fec0:0:0:1::1"}, {0: "fec0:0:0:2::2"}, 0, 1, 71, 0),
        ({0: "2001:db8:7:1::1"}, {0: "2001:db8:7:2::2"}, 0, 1, 71, 0),
        ({0: "2001:db8:7:1::1"}, {0: "2001:db8:8:1::2"}, 0, 1, 71, 0),
        # With an address for routers at index 1: bytes 4 and 5, no part of the subnet.
        ({1: "fec0:0:5:1::1"}, {0: "fe80::2", 1: "fec0:0:9:2::2"}, 0, 1, 9, 1),
        ({1: "fec0:0:5:1::1"}, {1: "fec0:0:9:1::2"}, 0, 0, 71, 1),
    ],
)
def test_a_global_route_where_subnets_differ(
    here: dict[int, str], there: dict[int, str], flags: int, is_global: int, dlid: int, index: int
) -> None:
    change, gid = run(of_infiniband, here, there, flags)
    assert (change.is_global, change.dlid, change.level) == (is_global, dlid, 5)
    if is_global:
        assert (change.gid, change.gid_index, change.traffic_class) == (gid, index, 8)
        assert change.hops > 1


def moved(fabric: Fabric) -> list[int]:
    """Each address goes to another index, as after a flap, or is another one."""
    put(fabric, {3: (IPV4, 2)}, {3: (IPV4, 2)})
    pair = Pair({"NCCL_IB_GID_INDEX": "3"})
    indices = []

    def connect() -> None:
        pair.connected()
        indices.append(fabric.changes()[-2].gid_index)  # of the second end

    connect()
    fabric.gid(1, 3, "::")
    with pytest.raises(RuntimeError, match="port 1 of made_up1: GID 3 is empty"):
        pair.connected()
    fabric.gid(1, 5, IPV4.format(2))
    connect()
    fabric.gid(1, 3, "fe80::7")  # the link-local one is there before it
    connect()
    fabric.gid(1, 5, "::")
    fabric.gid(1, 3, IPV4.format(9))  # the interface has a new address
    connect()
    fabric.gid(1, 6, IPV4.format(2))  # the old one is of no use any more
    connect()
    pair.close()
    return indices


def test_an_address_that_has_moved_is_found_when_a_connection_is_opened_anew() -> None:
    assert run(moved) == [3, 5, 5, 3, 3]


def no_way(fabric: Fabric) -> list[str]:
    put(fabric, {3: (IPV4, 2)}, {3: (IPV4, 2)})
    fabric.refuse(22)
    pair = Pair({})
    words = pair.refused()
    pair.close()
    return words


def test_a_device_that_finds_no_way_is_named() -> None:
    words = [f"{device} finds no way to the other side: Invalid argument" for device in DEVICES]
    assert run(no_way) == words


def unregistered(fabric: Fabric, count: int) -> list[str]:
    """What is logged while messages go between two ranks that register memory `count` times."""
    put(fabric, {3: (IPV4, 2)}, {3: (IPV4, 2)})
    fabric.registrations(count)
    size = 1 << 20
    with two_ranks([Rail(device, 1, 3) for device in DEVICES], count > 0) as (ends, lines):
        for tag in range(3):
            got, sent = ctypes.create_string_buffer(size), bytes([tag + 1]) * size
            work = ends[1].engine.receive(0, tag, ctypes.addressof(got), size)
            ends[0].engine.send(1, tag, ctypes.cast(sent, ctypes.c_void_p).value or 0, size)
            assert work.wait(PATIENCE)
            assert not work.error()
            assert got.raw == sent
        until(lambda: bool(lines), "it is logged")
    return lines


@pytest.mark.parametrize("count", [0, 4])
def test_memory_that_cannot_be_registered_ends_no_message(count: int) -> None:
    """Not that of slots, with which a queue pair begins; or, later, not that of messages."""
    lines = run(unregistered, count)
    assert len(lines) <= 4, "each rank has a line for the rail, and one for the path"
    for line in lines:
        assert "training goes on" in line
        assert "cannot register memory" in line or "the other side" in line
        if count == 0:
            assert "without it: made_up1 cannot register memory (`ulimit -l` should say" in line
