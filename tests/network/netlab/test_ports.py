"""Hosts with rates: what a port passes in all, each way, and what holds for TCP."""

from __future__ import annotations

import json
import sys

import pytest
from labs import CONNECTED, lab

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.emulate.rules import PortRule, parse_port_rules

# Host 0 sends 2 MB to each other host, or gets them: first one after the other, then at once.
# Prints how much longer it took them one after the other.
SHARE = (
    CONNECTED
    + """
index, inwards = int(os.environ["HOST_INDEX"]), os.environ["WAY"] == "in"
others, data = range(1, int(os.environ["WORLD_SIZE"])), bytes(2_000_000)
if index == 0:
    with socket.create_server((os.environ["HOST_IP"], 5000), backlog=8) as server:
        links = [server.accept()[0] for _ in others]
else:
    link = connected()
def receive(link):
    left = len(data)
    while left:
        got = len(link.recv(1 << 16))
        assert got
        left -= got
def turn(link):
    if inwards:
        link.sendall(b"g")
        receive(link)
    else:
        link.sendall(data)
        assert link.recv(1) == b"d"
def spent(work):
    began = time.monotonic()
    work()
    return time.monotonic() - began
def at_once():
    threads = [threading.Thread(target=turn, args=(link,)) for link in links]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
if index == 0:
    apart = spent(lambda: [turn(link) for link in links])
    print("ratio", apart / spent(at_once), flush=True)
else:
    for _ in range(2):
        if inwards:
            assert link.recv(1) == b"g"
            link.sendall(data)
        else:
            receive(link)
            link.sendall(b"d")
"""
)


def test_rules_of_ports():
    assert parse_port_rules("1:8MB/s@3..", 4, "--host") == [PortRule(1, 8e6, 3)]
    both = parse_port_rules("all:1kB/s@2s..5s", 2, "--host")
    assert both == [PortRule(host, 1e3, 2, 5, True) for host in (0, 1)]
    assert [both[0].active(9, second) for second in (1.9, 2, 4.9, 5)] == [False, True, True, False]


@pytest.mark.parametrize(
    "text", ["4:1MB/s", "1:0MB/s", "1:inf", "1:1MB", "x:1MB/s", "1-2:1MB/s", "1:1MB/s@5..5", "1:"]
)
def test_rules_that_no_port_has(text):
    with pytest.raises(BadInput, match="--host"):
        parse_port_rules(text, 4, "--host")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--link", "0-1:4ms"], "a laboratory has slow links, or rates of hosts"),
        (["--shaper", "relay"], "--shaper relay cannot keep rates of hosts"),
        (["--delay", "-1ms"], "--delay"),
    ],
)
@pytest.mark.root
def test_rates_need_the_kernels_bridge(words, message):
    done = lab("measure", "--host", "0:1MB/s", *words)
    assert done.returncode in (1, 2)
    assert message in done.stderr


@pytest.mark.quiet
@pytest.mark.usefixtures("ports")
def test_ports_keep_their_rates_each_way_and_the_settings_of_tcp_are_recorded():
    done = lab("measure", "--hosts", "3", "--host", "1:2MB/s", "--host", "2:4MB/s", "--json")
    found = json.loads(done.stdout)
    assert found["tcp"] == {
        "congestion_control": "cubic", "mtu": 9000, "segments": 32000,
        "slow_start_after_idle": False,
    }  # fmt: skip
    assert "cubic, MTU 9000, 32000 bytes at once, slow start after idle off" in done.stderr
    links = {each["link"]: each["measured"]["bandwidth"] for each in found["links"]}
    assert links.keys() == {"1>2", "2>1", "2>0", "0>2"}
    for link, rate in (("1>2", 2e6), ("2>1", 2e6), ("2>0", 4e6), ("0>2", 4e6)):
        assert links[link] == pytest.approx(rate, rel=0.1), found


@pytest.mark.quiet
@pytest.mark.usefixtures("ports")
def test_hosts_with_rates_may_be_apart():
    words = ["--hosts", "3", "--host", "all:4MB/s", "--delay", "30ms", "--json"]
    found = json.loads(lab("measure", *words).stdout)
    links = {each["link"]: each["measured"] for each in found["links"]}
    assert links.keys() == {"0>1", "1>0", "1>2", "2>1", "2>0", "0>2"}
    for link in links.values():
        assert link["delay_ms"] >= 30
        assert link["bandwidth"] < 4.4e6, found


def test_a_delay_needs_rates():
    done = lab("measure", "--hosts", "2", "--delay", "30ms")
    assert (done.returncode, "--delay '30ms': it needs --host" in done.stderr) == (2, True)


@pytest.mark.quiet
@pytest.mark.usefixtures("ports")
@pytest.mark.parametrize(("way", "shared"), [("in", True), ("out", True), ("in", False)])
def test_a_port_is_shared_by_all_its_links(way, shared, monkeypatch):
    """Through one port at once takes as long as one after the other; through two, half of that."""
    monkeypatch.setenv("WAY", way)
    rules = ["0:4MB/s"] if shared else ["1:4MB/s", "2:4MB/s"]
    hosts = [word for text in rules for word in ("--host", text)]
    done = lab("run", "--no-measure", "--hosts", "3", *hosts, "--", sys.executable, "-c", SHARE)
    assert done.returncode == 0, done.stderr
    ratio = float(done.stdout.partition("ratio ")[2].split()[0])
    assert 0.8 < ratio < 1.25 if shared else ratio > 1.6, ratio


# Host 0 sends 1 MB to host 1 in each iteration; prints the seconds of each.
REPEAT = (
    CONNECTED
    + """
if os.environ["HOST_INDEX"] == "0":
    with socket.create_server((os.environ["HOST_IP"], 5000)) as server:
        link, _ = server.accept()
    for number in range(6):
        began = time.monotonic()
        link.sendall(bytes(1_000_000))
        assert link.recv(1) == b"d"
        print(f"iteration {number}: {time.monotonic() - began}", flush=True)
        time.sleep(0.3)  # the laboratory reads the line, and the bucket fills
else:
    link = connected()
    left = 1_000_000
    while data := link.recv(1 << 16):
        left -= len(data)
        if not left:
            left = 1_000_000
            link.sendall(b"d")
"""
)


@pytest.mark.quiet
@pytest.mark.usefixtures("ports")
def test_a_rate_holds_for_some_iterations():
    """The rate changes while the network is in use, and connections survive that."""
    command = [sys.executable, "-c", REPEAT]
    done = lab("run", "--no-measure", "--host", "1:2MB/s@2..3", "--", *command)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "iteration" in line]
    seconds = [float(line.rpartition(" ")[2]) for line in lines]
    # A line is read once its iteration is over: the rate holds in the one after it.
    assert seconds[3] > 0.4
    assert max(seconds[4:]) < seconds[3] / 2
    assert min(seconds[:2]) < seconds[3] / 2
