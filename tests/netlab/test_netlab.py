"""The laboratory: links keep what was asked, commands run on every host, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from living import living

from megatron_adaptra.errors import BadInput
from megatron_adaptra.netlab.lab import Lab
from megatron_adaptra.transport.rules import LinkRule, parse_rules
from megatron_adaptra.transport.scenario import hosts_in, load_rules

LAB = pytest.mark.usefixtures("laboratory")
COMMAND = [sys.executable, "-m", "megatron_adaptra", "netlab"]
# Host 0 serves; each other host says how long a byte takes there and back, in ms.
ECHO = """
import os, socket, time
index, master = int(os.environ["HOST_INDEX"]), os.environ["MASTER_ADDR"]
if index == 0:
    with socket.create_server((os.environ["HOST_IP"], 5000)) as server:
        for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
            link, _ = server.accept()
            while data := link.recv(64):
                link.sendall(data)
else:
    deadline = time.monotonic() + 20
    while True:
        try:
            link = socket.create_connection((master, 5000), timeout=20)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    for number in range(int(os.environ.get("ROUNDS", "3"))):
        began = time.monotonic()
        link.sendall(b"x")
        link.recv(1)
        print(f"iteration {number}: {1e3 * (time.monotonic() - began):.1f}", flush=True)
        time.sleep(0.05)
"""


@pytest.fixture(scope="session")
def laboratory() -> None:
    """Root alone is not enough: a container may forbid namespaces."""
    done = lab("run", "--hosts", "2", "--", "true")
    if done.returncode != 0:
        pytest.skip(f"no laboratory here: {done.stderr.strip()}")


def lab(*words: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=timeout, check=False
    )


def echoes(text: str, host: int) -> list[float]:
    lines = (line.split(": ") for line in text.splitlines() if line.startswith(f"[{host}] iter"))
    return [float(ms) for _, ms in lines]


def test_rules_of_a_network():
    (there,) = parse_rules("0>2:10ms,loss=0.5%@2s..3.5s", 3, anywhere=True)
    assert there == LinkRule(0, 2, 0.01, 2.0, 3.5, loss=0.005, timed=True)
    assert there.active(0, 2.0)
    assert not there.active(0, 3.5)
    assert hosts_in(["1-2:3ms", "0>7:1ms@5.."]) == 8


@pytest.mark.parametrize(
    "text",
    ["0-3:40ms", "1-1:4ms", "0-1:4ms,loss=100%", "0-1:4ms,loss=2", "0-1:4ms@5s..4s",
     "0-1:4ms@1.5..3", "0-1:4ms,bandwidth=0B/s", "0-1:4ms@1.2.3.."],
)  # fmt: skip
def test_rules_that_no_network_has(text):
    with pytest.raises(BadInput):
        load_rules([text], 3, network=True)


@pytest.mark.parametrize("text", ["0-1:4ms,loss=1%", "0-1:4ms@2s..5s"])
def test_an_emulated_link_neither_loses_nor_looks_at_the_clock(text):
    with pytest.raises(BadInput, match="adaptra netlab"):
        load_rules([text], 3)


def test_a_scenario_file(tmp_path):
    file = tmp_path / "slow.yaml"
    file.write_text(
        "links:\n"
        "- {link: 2-3, delay: 40ms, jitter: 8ms, loss: 0.1%}\n"
        "- {link: 0>3, delay: 5ms, bandwidth: 10MB/s, from: 2s, to: 5s}\n"
    )
    rules = load_rules([str(file)], 4, network=True)
    assert [(r.source, r.target, r.delay, r.loss, r.timed) for r in rules] == [
        (2, 3, 0.04, 0.001, False),
        (3, 2, 0.04, 0.001, False),
        (0, 3, 0.005, 0.0, True),
    ]
    assert (rules[2].first, rules[2].end) == (2.0, 5.0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "--link", "0-1:4ms"], "COMMAND"),
        (["run", "--hosts", "1", "--", "true"], "--hosts"),
        (["run", "--hosts", "2", "--link", "0-5:4ms", "--", "true"], "0-5"),
        (["run", "nowhere.yaml", "--", "true"], "nowhere.yaml"),
    ],
)
def test_bad_input(words, told):
    done = lab(*words)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert told in done.stderr


@LAB
def test_links_do_what_was_asked(tmp_path):
    out = tmp_path / "links.json"
    done = lab(
        "measure", "--link", "0-1:30ms", "--link", "1>2:10ms,jitter=3ms",
        "--link", "2>0:5ms,bandwidth=8MB/s,loss=20%", "--json", str(out),
    )  # fmt: skip
    links = {link["link"]: link["measured"] for link in json.loads(out.read_text())["links"]}
    assert list(links) == ["0>1", "1>0", "1>2", "2>0"]
    # Never faster than asked; how much slower depends on what else this machine does.
    assert links["0>1"]["delay"] >= 0.03
    assert links["1>2"]["delay"] > 0.008
    assert links["1>2"]["jitter"] > 0.0005
    assert links["2>0"]["delay"] >= 0.005
    assert links["2>0"]["bandwidth"] < 9e6
    assert links["2>0"]["loss"] > 0
    assert done.returncode in (0, 1)
    assert "2>0" in done.stderr


@LAB
def test_a_command_on_every_host_across_a_slow_link():
    done = lab("run", "--hosts", "3", "--link", "0-2:25ms", "--", sys.executable, "-c", ECHO)
    assert done.returncode == 0, done.stderr
    assert min(echoes(done.stdout, 2)) >= 50  # the first link is slow both ways
    assert min(echoes(done.stdout, 1)) < min(echoes(done.stdout, 2)) / 2
    assert "packets" in done.stderr


@LAB
@pytest.mark.parametrize("when", ["@4..8", "@0.6s..1.2s"])
def test_a_link_that_is_slow_for_a_while(when, monkeypatch):
    monkeypatch.setenv("ROUNDS", "30")
    done = lab(
        "run", "--no-measure", "--link", f"0-1:100ms{when}", "--", sys.executable, "-c", ECHO
    )
    times = echoes(done.stdout, 1)
    slow = [number for number, ms in enumerate(times) if ms >= 190]
    assert slow, times
    assert slow[0] > 0
    assert slow[-1] < 29
    assert slow == list(range(slow[0], slow[-1] + 1))


@LAB
def test_the_worst_status_is_the_labs():
    done = lab("run", "--hosts", "2", "--", "sh", "-c", "exit $HOST_INDEX")
    assert done.returncode == 1
    assert "ended with 1 on host 1" in done.stderr
    done = lab("run", "--hosts", "2", "--", "no-such-program")
    assert done.returncode == 127
    assert "no-such-program" in done.stdout


@LAB
def test_words_and_variables_of_a_host():
    script = "echo {index} {ip} $HOST_INDEX $RANK $WORLD_SIZE $PET_NODE_RANK $MASTER_ADDR $$"
    done = lab("run", "--hosts", "2", "--", "sh", "-c", script)
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0 10.77.0.1 0 0 2 0 10.77.0.1 2",
        "[1] 1 10.77.0.2 1 1 2 1 10.77.0.1 2",
    ]


def namespaces() -> set[str]:
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(entry / "ns/net"))
    return found


@contextlib.contextmanager
def running(mark: str) -> Iterator[subprocess.Popen[str]]:
    """A laboratory whose commands have started processes that nobody waits for."""
    script = f"sleep 300 {mark} & setsid sleep 300 {mark} & echo up; wait"
    process = subprocess.Popen(
        [*COMMAND, "run", "--hosts", "3", "--", "sh", "-c", script.replace(f" {mark}", ""), mark],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(3)) == [
            f"[{host}] up\n" for host in range(3)
        ]
        yield process
    finally:
        process.kill()
        process.communicate()


@LAB
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_behind(signum):
    mark = f"adaptra-mark-{os.getpid()}-{int(signum)}"
    before = namespaces()
    with running(mark) as process:
        inside = namespaces() - before
        assert len(inside) == 3
        assert len(living(mark)) >= 4
        process.send_signal(signum)
        process.wait(60)
    deadline = time.monotonic() + 20
    while (living(mark) or namespaces() & inside) and time.monotonic() < deadline:
        time.sleep(0.05)  # the kernel ends orphans, which is no event for us
    assert living(mark) == {}
    assert not namespaces() & inside
    assert not list(Path("/sys/class/net").glob("tun*"))


@LAB
def test_two_laboratories_at_once():
    def start(ms: int) -> subprocess.Popen[str]:
        command = [*COMMAND, "run", "--no-measure", "--link", f"0-1:{ms}ms", "--"]
        return subprocess.Popen(
            [*command, sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True
        )

    first, second = start(60), start(5)
    slow, fast = (echoes(process.communicate(timeout=60)[0], 1) for process in (first, second))
    assert min(slow) >= 120
    assert 10 <= min(fast) < min(slow) / 2


@LAB
def test_a_host_that_dies_is_reported():
    def end_all(host: int, line: bytes) -> None:
        if b"up" in line and host == 1:
            pid = network._hosts[1].pid
            os.kill(pid, signal.SIGKILL)

    with Lab(2, []) as network:
        script = "echo up; test {index} = 0 || sleep 300"
        statuses = network.run(["sh", "-c", script], os.environ, end_all)
    assert statuses == [0, 128 + signal.SIGKILL]
