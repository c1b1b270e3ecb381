"""Distances on made-up buses."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_adaptra.device.pci import Distance, Nic, nearest, nic_of, node_near

GPU = "0000:1b:00.0"


class Machine:
    """A sysfs of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bus" / "pci" / "devices").mkdir(parents=True)

    def device(self, bus: str, way: str, node: int = -1) -> Path:
        """`way`: addresses from the root port on."""
        folder = self.root.joinpath("devices", bus, *way.split())
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        (self.root / "bus" / "pci" / "devices" / folder.name).symlink_to(folder)
        return folder

    def nic(self, name: str, folder: Path, kind: str = "infiniband") -> None:
        own = folder / kind / name
        own.mkdir(parents=True)
        (own / "device").symlink_to(folder)
        (self.root / "class" / kind).mkdir(parents=True, exist_ok=True)
        (self.root / "class" / kind / name).symlink_to(own)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """As a server with eight GPUs has it: a switch, switches behind switches, two sockets."""
    made = Machine(tmp_path)
    made.device("pci0000:15", f"0000:15:01.0 0000:16:00.0 0000:17:00.0 {GPU}", 0)
    near = made.device("pci0000:15", "0000:15:01.0 0000:16:00.0 0000:17:01.0 0000:18:00.0", 0)
    made.nic("mlx5_7", near)
    behind = "0000:15:01.0 0000:16:00.0 0000:17:02.0 0000:20:00.0 0000:21:00.0 0000:22:00.0"
    made.nic("mlx5_1", made.device("pci0000:15", behind, 0))
    made.nic("mlx5_2", made.device("pci0000:27", "0000:27:01.0 0000:28:00.0", 0))
    made.nic("mlx5_3", made.device("pci0000:97", "0000:97:01.0 0000:98:00.0", 1))
    made.nic("eno1", made.device("pci0000:00", "0000:00:1c.0 0000:02:00.0", 0), "net")
    made.nic("eno2", near, "net")
    made.nic("docker0", made.root / "devices" / "virtual", "net")
    return made


def test_interfaces_by_their_distance(machine: Machine) -> None:
    assert nic_of(GPU, machine.root) == [
        Nic(Distance.SWITCH, False, "eno2"),
        Nic(Distance.SWITCH, True, "mlx5_7"),
        Nic(Distance.ROOT_PORT, True, "mlx5_1"),
        Nic(Distance.NODE, False, "eno1"),
        Nic(Distance.NODE, True, "mlx5_2"),
        Nic(Distance.FAR, True, "mlx5_3"),
    ]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("mlx5_1 mlx5_2 mlx5_3 mlx5_7", "mlx5_7"),
        ("mlx5_1 mlx5_2 mlx5_3", "mlx5_1"),
        ("mlx5_3 mlx5_2", "mlx5_2"),
        ("mlx5_3", "mlx5_3"),
        ("rxe0", "rxe0"),
        ("", ""),
    ],
)
def test_the_nearest_of_those_that_are_chosen(machine: Machine, names: str, wanted: str) -> None:
    assert nearest(GPU, frozenset(names.split()), machine.root) == frozenset(wanted.split())


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_node_of_a_gpu_where_there_are_others(machine: Machine, nodes: int) -> None:
    for node in range(nodes):
        (machine.root / "devices" / "system" / "node" / f"node{node}").mkdir(parents=True)
    found = [node_near(pci, machine.root) for pci in (GPU, "0000:98:00.0", "0000:99:00.0")]
    assert found == ([0, 1, None] if nodes == 2 else [None] * 3)


def test_a_gpu_that_is_not_there_has_nothing_near(machine: Machine) -> None:
    assert {nic.distance for nic in nic_of("0000:99:00.0", machine.root)} == {Distance.FAR}
    every = frozenset({"mlx5_1", "mlx5_7"})
    assert nearest("0000:99:00.0", every, machine.root) == every


def test_a_flat_bus_of_a_virtual_machine(tmp_path: Path) -> None:
    """No bridges, and no word of NUMA: everything is equally far."""
    made = Machine(tmp_path)
    made.device("pci0000:00", "0000:00:07.0")
    for n in range(2):
        made.nic(f"mlx5_{n}", made.device("pci0000:00", f"0000:00:0{n + 3}.0"))
    both = frozenset({"mlx5_0", "mlx5_1"})
    assert nearest("0000:00:07.0", both, made.root) == both
    assert nic_of("0000:00:07.0", tmp_path / "nothing") == []
