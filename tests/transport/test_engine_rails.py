"""Which RDMA ports there are, and which are chosen, as NCCL's variables say."""

from __future__ import annotations

import importlib.util

import pytest

from megatron_adaptra.errors import BadInput, MissingPackage
from megatron_adaptra.transport.engine.devices import device_ports
from megatron_adaptra.transport.engine.native import Port
from megatron_adaptra.transport.engine.rails import Rail, chosen


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


def test_the_address_is_the_best_one_unless_it_is_named() -> None:
    assert chosen(PORTS[:1], {}) == [Rail("mlx5_10", 1, -1)]
    assert chosen(PORTS[:1], {"NCCL_IB_GID_INDEX": "3"}) == [Rail("mlx5_10", 1, 3)]
    with pytest.raises(BadInput, match="NCCL_IB_GID_INDEX: 'x' is not allowed"):
        chosen(PORTS, {"NCCL_IB_GID_INDEX": "x"})


def test_a_list_of_devices_says_what_it_needs() -> None:
    if importlib.util.find_spec("pyverbs"):
        pytest.skip("pyverbs is installed: its list is tested in the virtual machine")
    with pytest.raises(MissingPackage, match=r"needs pyverbs, .* 'megatron-adaptra\[rdma-dev\]'"):
        device_ports()
