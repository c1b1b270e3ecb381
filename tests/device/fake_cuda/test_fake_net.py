"""The fake NCCL between hosts: over a network plugin, as the real one, or over its sockets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fake_runs import run_script
from fakes.slow_net.network import NAME, SlowNetwork
from patience import in_some_run

HOSTS = ("host-0", "host-1")
INVALID_USAGE, REMOTE_ERROR = 5, 6
SIZES = (0, 1, 4096, 3_000_001, 80 << 20)  # the plugin takes the last one in two parts
PARTS = (0, 1, 4096, 3_000_001, 64 << 20, 16 << 20)
TOGETHER = tuple(4096 + i for i in range(8))
HALVES = (2000, 2000)  # of a sum's 1000 numbers
DELAY = 0.25  # seconds
MODES = pytest.mark.parametrize("credit_first", [False, True], ids=["eager", "credit first"])


def new_network(folder: Path, *, credit_first: bool, delay: float = DELAY) -> SlowNetwork:
    folder.mkdir()
    network = SlowNetwork(folder, HOSTS)
    network.credit_first(credit_first)
    for source, target in (HOSTS, HOSTS[::-1]):
        network.slow(source, target, delay)
    return network


def scenario(name: str, environments: list[dict[str, str]], *words: str) -> list[Any]:
    return run_script("net_script.py", name, *words, ranks=2, environments=environments)


def environments(network: SlowNetwork, log: Path) -> list[dict[str, str]]:
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log / "nccl-%p.log")}
    return [network.environment(host) | debug for host in HOSTS]


def spans(found: list[Any]) -> list[float]:
    """Of both messages of an exchange: seconds from its begin at the sender to its end."""
    (begin, end, right), (other_begin, other_end, other_right) = found
    assert right
    assert other_right
    return [(other_end - begin) / 1e9, (end - other_begin) / 1e9]


@MODES
def test_messages_between_hosts_go_over_the_plugin(tmp_path: Path, credit_first: bool) -> None:
    """One device, two hosts: bytes are right and never early; several take one delay."""
    runs = 0

    def run() -> list[float]:
        nonlocal runs
        runs += 1
        network = new_network(tmp_path / f"run-{runs}", credit_first=credit_first)
        given = environments(network, network.folder)
        found = scenario("messages", given, *map(str, SIZES))
        assert [one["sum"] for one in found] == [[3.0], [3.0]]
        for number in range(len(SIZES)):
            assert min(spans([one["alone"][number] for one in found])) >= DELAY
        for source, target in (HOSTS, HOSTS[::-1]):
            passed = [m.bytes for m in network.passed() if (m.source, m.target) == (source, target)]
            assert passed == [0, *TOGETHER, *PARTS, *HALVES]
        logs = [path.read_text() for path in sorted(network.folder.glob("nccl-*.log"))]
        assert len(logs) == 2
        for log in logs:
            assert f"NCCL INFO Using network {NAME}" in log
            assert sorted(re.findall(rf"\[(\w+)\] via NET/{NAME}/0\n", log)) == ["receive", "send"]
        return spans([one["together"] for one in found])

    trips = 3 if credit_first else 1  # credit, message and acknowledgement
    together = in_some_run(run, lambda found: max(found) < (trips + 1) * DELAY)
    assert min(together) >= trips * DELAY


def test_sockets_serve_between_hosts_without_a_plugin() -> None:
    found = scenario("messages", [{"NCCL_HOSTID": host} for host in HOSTS], *map(str, SIZES))
    assert [one["sum"] for one in found] == [[3.0], [3.0]]
    for one in found:
        assert all(right for _, _, right in (*one["alone"], one["together"]))


@pytest.mark.parametrize("variables", [{}, {"NCCL_HOSTID": "host-0"}], ids=["unset", "equal"])
def test_ranks_of_one_host_cannot_share_a_device(variables: dict[str, str]) -> None:
    assert scenario("same", [variables, variables]) == [INVALID_USAGE, INVALID_USAGE]


def test_a_network_that_the_plugin_does_not_have_is_an_error(tmp_path: Path) -> None:
    network = new_network(tmp_path / "net", credit_first=False)
    given = [network.environment(host) | {"NCCL_NET": "Another"} for host in HOSTS]
    assert all(scenario("same", given))


@MODES
def test_a_host_that_ends_is_a_remote_error(tmp_path: Path, credit_first: bool) -> None:
    network = new_network(tmp_path / "net", credit_first=credit_first)
    assert scenario("ends", environments(network, tmp_path))[0] == REMOTE_ERROR


def test_a_host_that_ends_while_a_message_is_under_way_is_a_remote_error(tmp_path: Path) -> None:
    """Only the plugin sees it: the sender waits for what comes back over the slow link."""
    network = new_network(tmp_path / "net", credit_first=True, delay=1.0)
    found = scenario("ends_under_way", environments(network, tmp_path), "0.5")
    assert found[0] == REMOTE_ERROR
