"""`adaptra doctor` on machines that are made up, broken, or this one."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from patience import PATIENCE

from megatron_adaptra.cli import doctor
from megatron_adaptra.cli.main import main
from megatron_adaptra.device import gpu_bindings as gpu_driver
from megatron_adaptra.doctor import examine as examining
from megatron_adaptra.doctor.engine import rdma
from megatron_adaptra.doctor.examine import Part, examine
from megatron_adaptra.doctor.finding import Finding, Status
from megatron_adaptra.doctor.gpus import gpus
from megatron_adaptra.doctor.machine import machine
from megatron_adaptra.doctor.network import network
from megatron_adaptra.transport.engine import bindings
from megatron_adaptra.transport.engine.bindings import Port
from megatron_adaptra.transport.engine.rails import VARIABLES

OK, WARN, FAIL = Status
ACTIVE = Port("mlx5_0", 1, True, "Ethernet", 3, b"\0" * 16, "RoCE v2, IPv4")
CLOCK = "sys/devices/system/clocksource/clocksource0"


def put(root: Path, **files: object) -> None:
    """Files by their path, whose / is written as __."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


@pytest.mark.parametrize(
    ("now", "others", "status", "remedy"),
    [
        ("tsc", "tsc hpet", OK, ""),
        ("hpet", "tsc hpet", WARN, f"echo tsc > /{CLOCK}/current_clocksource"),
        ("acpi_pm", "acpi_pm", WARN, "ask for a machine"),
    ],
)
def test_a_slow_clock(tmp_path: Path, now: str, others: str, status: Status, remedy: str) -> None:
    path = CLOCK.replace("/", "__")
    put(tmp_path, **{f"{path}__current_clocksource": now, f"{path}__available_clocksource": others})
    found = by_name(machine(tmp_path))["clock"]
    assert found.status is status
    assert found.remedy.startswith(remedy)
    assert bool(found.remedy) == bool(remedy)


def test_a_machine_that_says_nothing_has_no_faults_but_missing_memory(tmp_path: Path) -> None:
    found = by_name(machine(tmp_path))
    assert found["clock"].status is OK
    assert found["shared memory"].status is WARN
    assert "--shm-size" not in found["shared memory"].remedy


def test_locked_memory_matters_where_there_are_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    assert by_name(machine(tmp_path))["locked memory"].status is OK
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    found = by_name(machine(tmp_path))["locked memory"]
    assert (found.status, found.remedy[:18]) == (WARN, "ulimit -l unlimite")
    assert "8 MiB" in found.says
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert by_name(machine(tmp_path))["locked memory"].status is OK


def test_interfaces_that_lose_packets(tmp_path: Path) -> None:
    for name, errors in (("eth0", 0), ("eth1", 7)):
        here = f"sys__class__net__{name}"
        put(tmp_path, **{f"{here}__operstate": "up", f"{here}__speed": 25000, f"{here}__mtu": 9000})
        put(tmp_path, **{f"{here}__statistics__rx_crc_errors": errors})
    put(tmp_path, sys__class__net__lo__operstate="unknown")
    found = by_name(machine(tmp_path))
    assert found["interface eth0"] == (OK, "interface eth0", "up, 25 Gbit/s, MTU 9000", "")
    assert found["interface eth1"].status is WARN
    assert "rx_crc_errors 7" in found["interface eth1"].says
    assert found["interface eth1"].remedy == "ethtool -S eth1"
    assert "interface lo" not in found


@pytest.fixture
def ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two ports; the root of its sysfs."""
    monkeypatch.setattr(bindings, "missing_verbs", lambda: "")
    for name in ("NCCL_IB_DISABLE", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for device in ("mlx5_0", "mlx5_1"):
        here = f"class__infiniband__{device}__ports__1"
        put(tmp_path, **{f"{here}__state": "4: ACTIVE", f"{here}__rate": "200 Gb/sec (4X HDR)"})
        put(tmp_path, **{f"{here}__link_layer": "Ethernet", f"{here}__counters__link_downed": 0})
    return tmp_path


def test_rdma_ports_and_which_are_used(ports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [ACTIVE, replace(ACTIVE, device="mlx5_1")]
    found = by_name(rdma(both, ports))
    assert found["RDMA"].says == "messages use mlx5_0:1, mlx5_1:1"
    assert found["port mlx5_0:1"].says == (
        "active, 200 Gb/sec (4X HDR), Ethernet, GID 3, RoCE v2, IPv4"
    )
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_1")
    found = by_name(rdma(both, ports))
    assert found["RDMA"].says == "messages use mlx5_1:1 (NCCL_IB_HCA=mlx5_1)"
    assert found["port mlx5_0:1"].says.endswith("; not used")
    monkeypatch.setenv("NCCL_IB_TC", "106")
    found = by_name(rdma(both, ports))
    assert found["RDMA"].says == "messages use mlx5_1:1 (NCCL_IB_HCA=mlx5_1, NCCL_IB_TC=106)"
    monkeypatch.setenv("NCCL_IB_RETRY_CNT", "8")
    refused = by_name(rdma(both, ports))["RDMA"]
    assert (refused.status, refused.remedy) == (FAIL, "unset NCCL_IB_RETRY_CNT")
    assert refused.says == "NCCL_IB_RETRY_CNT '8': it has to be a whole number from 0 to 7"
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    found = by_name(rdma(both, ports))
    assert (found["RDMA"].status, found["RDMA"].remedy) == (WARN, "unset NCCL_IB_DISABLE")


def test_rdma_ports_that_do_not_work(ports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    down = Port("mlx5_0", 1, False, "Ethernet", 3, b"", "RoCE v2, IPv4")
    bare = Port("mlx5_1", 1, True, "Ethernet", -1, b"", "no address")
    found = by_name(rdma([down, bare], ports))
    assert found["port mlx5_0:1"].remedy.startswith("rdma link show mlx5_0/1")
    assert found["port mlx5_1:1"].remedy.startswith("give its interface an address")
    assert "NCCL_IB_ADDR_FAMILY" not in found["port mlx5_1:1"].remedy
    with monkeypatch.context() as named:
        named.setenv("NCCL_IB_ADDR_FAMILY", "AF_INET6")
        found = by_name(rdma([down, bare], ports))
        assert found["RDMA"].status is OK
        assert found["port mlx5_1:1"].remedy.endswith(", or unset NCCL_IB_ADDR_FAMILY")
        named.setenv("NCCL_IB_ROCE_VERSION_NUM", "1")
        assert by_name(rdma([down, bare], ports))["port mlx5_1:1"].remedy.endswith(
            ", or unset NCCL_IB_ADDR_FAMILY, or unset NCCL_IB_ROCE_VERSION_NUM"
        )
        named.setenv("NCCL_IB_ADDR_FAMILY", "IPv6")
        found = by_name(rdma([down, bare], ports))
        assert (found["RDMA"].status, found["RDMA"].remedy) == (FAIL, "unset NCCL_IB_ADDR_FAMILY")
    put(ports, class__infiniband__mlx5_0__ports__1__counters__link_downed=3)
    found = by_name(rdma([ACTIVE], ports))
    assert found["port mlx5_0:1"].status is WARN
    assert "link_downed 3" in found["port mlx5_0:1"].says
    with monkeypatch.context() as unbuilt:
        unbuilt.setattr(bindings, "missing", lambda: "it was not built")
        assert "there is no engine" in by_name(rdma([], ports))["RDMA"].says
    monkeypatch.setattr(bindings, "missing_verbs", lambda: "libibverbs.so.1: cannot open")
    found = by_name(rdma([], ports))
    assert (found["RDMA"].status, "libibverbs1" in found["RDMA"].remedy) == (FAIL, True)
    assert [*by_name(rdma([], ports / "nowhere")).values()] == [
        (OK, "RDMA", "there is no device: messages go over TCP and shared memory", "")
    ]


def test_gpus_whose_driver_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_driver, "missing", lambda: "cuInit says no")
    assert [f.status for f in gpus(tmp_path)] == [OK, OK]
    put(tmp_path, dev__nvidiactl="")
    found, _ = gpus(tmp_path)
    assert found.status is FAIL
    assert "cuInit says no" in found.says
    monkeypatch.setattr(gpu_driver, "missing", lambda: "")
    (tmp_path / "proc/driver/nvidia/gpus/0000:1b:00.0").mkdir(parents=True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "many")
    found = by_name(gpus(tmp_path))
    assert found["GPU 0000:1b:00.0"].says == "no interface is near to it"
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"].status is WARN


@pytest.mark.parametrize(
    ("cores", "near"),
    [
        ("0-3", True), ("1", True), ("8,3-5", True), ("", True), ("all", True), ("0-x", True),
        ("4-7", False), ("0,2-3", True), ("0,2,12", False), ("0-0", False),
    ],
)  # fmt: skip
def test_cores_of_another_numa_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: str, near: bool
) -> None:
    monkeypatch.setattr(gpu_driver, "missing", lambda: "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3})
    gpu = "0000:1b:00.0"
    (tmp_path / "proc/driver/nvidia/gpus" / gpu).mkdir(parents=True)
    put(tmp_path, **{f"sys__bus__pci__devices__{gpu}__local_cpulist": cores})
    found = by_name(gpus(tmp_path))[f"GPU {gpu}"]
    assert found.status is (OK if near else WARN)
    if not near:
        assert f"none of the cores of its NUMA node ({cores})" in found.says
        assert found.remedy.startswith(f"taskset -c {cores} (")


def torch_is(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(code)
    path = os.pathsep.join([str(folder), *sys.path])
    monkeypatch.setenv("PYTHONPATH", path)
    # The limits of computing and of silence are tested; a busy machine reaches the third one.
    monkeypatch.setattr(examining, "_AT_MOST", 100)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise OSError('libtorch.so is not there')", "imported: libtorch.so is not there"),
        ("import os; os.abort()", "not examined to the end: SIGABRT"),
        ("import time; time.sleep(600)", "not examined to the end: no answer in 3 s"),
        ("import os; os._exit(3)", "not examined to the end"),
        pytest.param(
            "while True: pass", "not examined to the end: no end after 3 s of computing",
            marks=pytest.mark.long,
        ),
    ],
    ids=["broken", "aborts", "hangs", "exits", "loops"],
)  # fmt: skip
def test_a_torch_that_does_not_load_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    torch_is(tmp_path, monkeypatch, code)
    endless = "sleep" in code or "while" in code
    (part,) = examine(["software"], patience=3 if endless else PATIENCE)
    first, *others = part.findings
    assert first.what == "megatron-adaptra"
    assert any(f.status is FAIL and says in f.says and f.remedy for f in others), others


SLOW = """
import time
for _ in range(40):
    time.sleep(0.1)
    end = time.process_time() + 0.03
    while time.process_time() < end: pass
raise OSError("slow, but it answers")
"""


@pytest.mark.long
def test_a_part_that_gets_little_of_the_machine_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It works for longer than the limit by the clock on the wall."""
    torch_is(tmp_path, monkeypatch, SLOW)
    (part,) = examine(["software"], patience=3)
    assert any("slow, but it answers" in found.says for found in part.findings), part


@pytest.mark.long
@pytest.mark.parametrize("end", ["os.abort()", "time.sleep(600)"], ids=["crashes", "hangs"])
def test_a_part_that_has_given_all_its_answers_may_end_as_it_likes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    code = f"import atexit, os, time\natexit.register(lambda: {end})\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    (part,) = examine(["machine"], patience=3)
    assert "open files" in {found.what for found in part.findings}
    assert not any("not examined" in found.says for found in part.findings)


NOT_IMPORTED = {  # what importing a module of Megatron raises: what is to be done
    "ModuleNotFoundError(\"No module named 'triton'\", name='triton')": "pip install triton",
    "ModuleNotFoundError(\"No module named 'yaml.x'\", name='yaml.x')": "pip install pyyaml",
    "OSError('libcudart.so.13: cannot open')": "import megatron.core.pipeline_parallel.sched",
}
BROKEN = f"""
import json, sys
from megatron_adaptra.doctor.software import software
errors = [{", ".join(NOT_IMPORTED)}]
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron.core.pipeline_parallel.p2p_communication":
            raise self.error
broken = Broken()
sys.meta_path.insert(0, broken)
for broken.error in errors:
    print("FOUND", json.dumps([finding.to_json() for finding in software()]))
"""


@pytest.mark.cold
def test_a_megatron_that_is_not_imported_is_not_called_too_old() -> None:
    """One process for all: what is imported there before is torch."""
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True)
    lines = [line[6:] for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(lines) == len(NOT_IMPORTED), done.stderr
    for remedy, line in zip(NOT_IMPORTED.values(), lines, strict=True):
        findings = [Finding.from_json(row) for row in json.loads(line)]
        found = by_name(findings)["megatron-core"]
        assert found.status is FAIL
        assert "cannot be imported: " in found.says
        assert "release" not in found.remedy
        assert remedy in found.remedy
        assert [f.what for f in findings if f.status is not OK] == ["megatron-core"]


def network_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **variables: str
) -> dict[str, Finding]:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR", "WORLD_SIZE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return by_name(network(folder))


def test_an_interface_that_does_not_exist_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = network_of(tmp_path, monkeypatch, GLOO_SOCKET_IFNAME="lo,nowhere9")[
        "GLOO_SOCKET_IFNAME"
    ]
    assert found.status is FAIL
    assert found.says == "there is no interface 'nowhere9': no training starts"
    assert found.remedy.startswith("export GLOO_SOCKET_IFNAME=")
    found = network_of(tmp_path, monkeypatch, NCCL_SOCKET_IFNAME="=nowhere9")["NCCL_SOCKET_IFNAME"]
    assert (found.status, "lo" in found.says) == (WARN, True)
    put(tmp_path, dev__nvidiactl="")
    found = network_of(tmp_path, monkeypatch, NCCL_SOCKET_IFNAME="=nowhere9")["NCCL_SOCKET_IFNAME"]
    assert found.status is FAIL
    assert "NCCL_SOCKET_IFNAME" not in network_of(tmp_path, monkeypatch, NCCL_SOCKET_IFNAME="^eth")


def test_an_address_that_other_hosts_do_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = network_of(tmp_path, monkeypatch, GLOO_SOCKET_IFNAME="lo")["address"]
    assert (found.status, "only this host reaches" in found.says) == (WARN, True)
    assert found.remedy.startswith("for several hosts: export GLOO_SOCKET_IFNAME=")
    for one in ({"NNODES": "1"}, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}):
        found = network_of(tmp_path, monkeypatch, GLOO_SOCKET_IFNAME="lo", **one)["address"]
        assert found.status is OK
    several = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    assert network_of(tmp_path, monkeypatch, **several)["address"].status is WARN


def test_interfaces_that_are_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, sys__class__net__eth7__operstate="down", sys__class__net__eth7__flags="0x1002")
    put(tmp_path, sys__class__net__eth8__operstate="down", sys__class__net__eth8__flags="0x1003")
    found = network_of(tmp_path, monkeypatch)
    assert found["interface eth7"].status is WARN
    assert found["interface eth7"].remedy.startswith("ip link set eth7 up")
    assert found["interface eth8"].status is WARN
    assert "it has no carrier" in found["interface eth8"].says


def test_the_command_on_a_bare_machine(tmp_path: Path) -> None:
    """Neither torch nor Megatron nor the engine can be found."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Nothing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        top = name.partition('.')[0]\n"
        "        if top in ('torch', 'megatron') or name.endswith('_native'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Nothing())\n"
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda n, p=None: None if n in ('torch', 'megatron') else find(n, p)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "megatron_adaptra", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "FAIL  torch" in done.stdout
    assert "-> pip install torch" in done.stdout
    assert "FAIL  megatron-core" in done.stdout
    assert "messages go over gloo" in done.stdout
    assert "not examined" not in done.stdout
    assert done.stdout.splitlines()[-1].endswith(" 2 FAIL")


@pytest.mark.long
def test_the_command_here() -> None:
    command = [sys.executable, "-m", "megatron_adaptra", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    data = json.loads(done.stdout)
    assert data["ok"] is True
    assert [*data["parts"]] == ["machine", "software", "engine", "GPUs"]
    found = [row for rows in data["parts"].values() for row in rows]
    assert all(row["verdict"] in ("OK", "WARN") and row["says"] for row in found)
    assert all(bool(row["remedy"]) == (row["verdict"] != "OK") for row in found)
    names = [row["what"] for row in found]
    assert {"torch", "megatron-core", "patch schedule", "engine executor", "TLS"} <= {*names}


@pytest.mark.parametrize(("words", "status"), [([], 0), (["--strict"], 1)])
def test_a_warning_fails_where_it_is_strict(
    words: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Part("machine", [Finding(OK, "one", "fine"), Finding(WARN, "other", "slow", "mend")])]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    assert main(["doctor", *words]) == status


@pytest.mark.parametrize("name", ["ifb0", "veth1a", "docker0", "virbr0", "br-12ab"])
def test_a_virtual_interface_that_is_down_is_no_news(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"sys__class__net__{name}__operstate": "down"}
    put(tmp_path, **state)
    assert f"interface {name}" not in network_of(tmp_path, monkeypatch)
    put(tmp_path, **dict.fromkeys(state, "up"))
    assert network_of(tmp_path, monkeypatch)[f"interface {name}"].status is not WARN
