"""Which RDMA ports there are, and which are chosen, as NCCL's variables say."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from controlled.test_pci import Machine

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.transport.address import chosen_by_nccl, local_address
from megatron_adaptra.transport.engine.bindings import Port
from megatron_adaptra.transport.engine.rails import Rail, chosen, preferred


def port(device: str, number: int = 1, active: bool = True) -> Port:
    return Port(device, number, active, "Ethernet", 3, bytes(16), "RoCE v2, IPv4")


PORTS = [
    port("mlx5_10"), port("mlx5_0"), port("mlx5_1"), port("mlx5_1", 2), port("bnxt_re0"),
    port("mlx5_2", active=False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("", "bnxt_re0:1 mlx5_0:1 mlx5_1:1 mlx5_1:2 mlx5_10:1"),
        ("mlx5", "mlx5_0:1 mlx5_1:1 mlx5_1:2 mlx5_10:1 mlx5_2:1"),
        ("mlx5_1,bnxt", "mlx5_1:1 mlx5_1:2 mlx5_10:1 bnxt_re0:1"),
        ("=mlx5_1,mlx5_0", "mlx5_1:1 mlx5_1:2 mlx5_0:1"),
        ("=mlx5_1:2,mlx5_2", "mlx5_1:2 mlx5_2:1"),
        ("^mlx5_1", "bnxt_re0:1 mlx5_0:1"),
        ("^=mlx5_1:1,bnxt_re0", "mlx5_0:1 mlx5_1:2 mlx5_10:1"),
        ("nothing", ""),
    ],
)
def test_ports_are_chosen_by_name(words: str, names: str) -> None:
    rails = chosen(PORTS, {"NCCL_IB_HCA": words})
    assert " ".join(f"{rail.device}:{rail.port}" for rail in rails) == names


def test_a_port_with_several_connections_stands_after_all_others_again() -> None:
    """So two ranks that have different numbers of them connect the same ports."""
    environ = {"NCCL_IB_HCA": "=mlx5_1:2,mlx5_0", "NCCL_IB_QPS_PER_CONNECTION": "3"}
    rails = chosen(PORTS, environ)
    assert [str(rail) for rail in rails] == ["mlx5_1:2", "mlx5_0:1"] * 3
    assert {rail.service.connections for rail in rails} == {3}


def test_the_address_is_the_best_one_unless_it_is_named() -> None:
    assert chosen(PORTS[:1], {}) == [Rail("mlx5_10", 1, -1)]
    assert chosen(PORTS[:1], {"NCCL_IB_GID_INDEX": "3"}) == [Rail("mlx5_10", 1, 3)]
    with pytest.raises(BadInput, match="NCCL_IB_GID_INDEX 'x': "):
        chosen(PORTS, {"NCCL_IB_GID_INDEX": "x"})


def test_rails_far_from_the_gpu_serve_last(tmp_path: Path) -> None:
    """They keep their places: the n-th rail of one rank meets the n-th one of the other."""
    made = Machine(tmp_path)
    made.device("pci0000:15", "0000:15:01.0 0000:16:00.0 0000:17:00.0 0000:18:00.0")
    near = "0000:15:01.0 0000:16:00.0 0000:17:01.0 0000:19:00.0"
    made.nic("mlx5_1", made.device("pci0000:15", near))
    made.nic("mlx5_0", made.device("pci0000:97", "0000:97:01.0 0000:98:00.0"))
    found = chosen([port("mlx5_0"), port("mlx5_1")], {})
    rails = preferred(found, "0000:18:00.0", tmp_path)
    assert [(rail.device, rail.far) for rail in rails] == [("mlx5_0", True), ("mlx5_1", False)]
    assert preferred(found[:1], "0000:18:00.0", tmp_path) == found[:1]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("eth", "eth0 eth1 eth10"),
        ("=eth1", "eth1"),
        ("^eth", "ib0 lo"),
        ("^=eth1,lo", "eth0 eth10 ib0"),
        ("ib,eth1", "eth1 eth10 ib0"),
        ("none", ""),
    ],
)
def test_interfaces_are_chosen_as_by_nccl(words: str, names: str) -> None:
    every = ["eth0", "eth1", "eth10", "ib0", "lo"]
    assert chosen_by_nccl(words, every) == names.split()


def test_the_interface_of_nccl_is_a_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # nobody's; nothing is sent there
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert local_address(gpu=True) == "127.0.0.1"
    with contextlib.suppress(OSError):  # there is no way to it
        assert local_address() != "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=nothing")
    assert local_address(gpu=True) == "127.0.0.1"
