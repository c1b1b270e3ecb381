"""The laboratory: links keep what was asked, commands run on every host, and nothing is left."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from labs import COMMAND, CONNECTED, lab
from patience import TooLate, decided, in_time

from megatron_adaptra.base.errors import AdaptraError, BadInput
from megatron_adaptra.emulate.rules import LinkRule, parse_rules
from megatron_adaptra.emulate.scenario import hosts_in, load_rules
from megatron_adaptra.netlab import netem
from megatron_adaptra.netlab.shaper import choose
from megatron_adaptra.netlab.user import give

ROOT = Path(__file__).resolve().parents[3]
# Host 0 serves; each other host says how long a byte takes there and back, in ms.
ECHO = (
    sys.executable,
    "-c",
    CONNECTED
    + """
index = int(os.environ["HOST_INDEX"])
assert os.environ["NCCL_IB_DISABLE"] == "1"  # RDMA ports are in all namespaces
if index == 0:
    with socket.create_server((os.environ["HOST_IP"], 5000)) as server:
        for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
            link, _ = server.accept()
            while data := link.recv(64):
                link.sendall(data)
else:
    link = connected()
    for number in range(int(os.environ.get("ROUNDS", "3"))):
        began = time.monotonic()
        link.sendall(b"x")
        link.recv(1)
        print(f"iteration {number}: {1e3 * (time.monotonic() - began):.1f}", flush=True)
        time.sleep(0.05)
""",
)

# Host 0 sends numbered packets, host 1 says which have come.
FLOOD = """
import os, socket, time
LAST = bytes(4 * [255])
count, gap = int(os.environ["COUNT"]), float(os.environ["GAP"])
box = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
box.bind((os.environ["HOST_IP"], 5000))
box.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE: it loses none
if os.environ["HOST_INDEX"] == "0":
    _, peer = box.recvfrom(64)
    for number in range(count):
        box.sendto(number.to_bytes(4, "big").ljust(7972), peer)  # 8000 with its heads
        time.sleep(gap)
    box.settimeout(0.2)
    deadline, answer = time.monotonic() + 120, b""
    while answer != b"all" and time.monotonic() < deadline:
        box.sendto(LAST, peer)  # behind all others, and again where there was no room for it
        try:
            answer = box.recv(64)
        except TimeoutError:
            pass
else:
    box.settimeout(0.1)
    seen, deadline, data = [], time.monotonic() + 120, b""
    while data != LAST and time.monotonic() < deadline:
        try:
            data = box.recv(9000)[:4]
            seen.append(int.from_bytes(data, "big"))
        except TimeoutError:
            if not seen:
                box.sendto(b"go", (os.environ["MASTER_ADDR"], 5000))
    for _ in range(5):
        box.sendto(b"all", (os.environ["MASTER_ADDR"], 5000))
    print(*[number for number in seen if number < count])
"""


def flood(shaper: str, count: int, gap: float, link: str) -> list[int]:
    """Which packets have come, in this order."""
    words = ["run", "--shaper", shaper, "--no-measure", "--link", link, "--", "env"]
    done = lab(*words, f"COUNT={count}", f"GAP={gap}", sys.executable, "-c", FLOOD)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.removeprefix("[1] ").split()]


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
    ("words", "message"),
    [
        (["run", "--link", "0-1:4ms"], "COMMAND"),
        (["run", "--host", "2", "--", "true"], "--host"),
        (["run", "--hosts", "2", "--link", "0-5:4ms", "--", "true"], "0-5"),
        (["run", "nowhere.yaml", "--", "true"], "nowhere.yaml"),
        (["run", "--hosts", "0", "--", "true"], "--hosts"),
        (["run", "--timeout", "nan", "--", "true"], "--timeout"),
    ],
)
def test_bad_input(words, message):
    done = lab(*words)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert message in done.stderr


def without(capability: str) -> list[str]:
    """A command that runs another one as a root who lacks this."""
    if shutil.which("setpriv") is None or os.geteuid() != 0:
        pytest.skip("it takes root, and setpriv of util-linux")
    return ["setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}"]


@pytest.mark.parametrize("name", ["sys_admin", "net_admin"])
def test_a_root_who_may_not_make_networks_gets_the_missing_capabilities(name):
    words = [*without(name), *COMMAND, "run", "--hosts", "2", "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"this root lacks CAP_{name.upper()} (containers: --cap-add=" in line


@pytest.mark.long
def test_the_limit_of_time_is_named(shaper):
    sleeps = ["sh", "-c", "test $RANK = 0 || exec sleep 600"]
    done = lab("run", "--hosts", "2", "--shaper", shaper, "--timeout", "5", "--", *sleeps)
    assert done.returncode == 143
    assert done.stderr.splitlines()[-1] == (
        "adaptra: --timeout 5 is over: the command was ended on host 1"
    )
    heeds = ["sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait"]
    done = lab("run", "--hosts", "2", "--shaper", shaper, "--timeout", "5", "--", *heeds)
    assert done.returncode == 124


def test_netem_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(netem, "_PATH", "/nowhere")
    assert choose("relay") == ("relay", "")
    way, why = choose("auto")
    assert way == "relay"
    assert "iproute2" in why
    with pytest.raises(AdaptraError, match=r"--shaper netem .* ip is missing.*iproute2"):
        choose("netem")
    with pytest.raises(BadInput, match="auto, netem, relay"):
        choose("wire")


@pytest.mark.root
def test_hosts_without_slow_links_need_no_netem():
    if (found := choose("auto", slow=False))[0] != "netem":
        pytest.skip(f"no bridge here: {found[1]}")
    done = lab("run", "--hosts", "3", "--", *ECHO)
    assert done.returncode == 0, done.stderr
    assert "3 hosts; joined by a bridge" in done.stderr
    assert done.stdout.count("iteration ") == 6


@pytest.mark.timing
@pytest.mark.parametrize("shaper", ["relay", "netem"], indirect=True)
def test_links_do_what_was_asked(shaper):
    done = lab(
        "measure", "--shaper", shaper, "--link", "0-1:30ms", "--link", "1>2:10ms,jitter=3ms",
        "--link", "2>0:5ms,bandwidth=8MB/s,loss=20%",
        "--json",
    )  # fmt: skip
    written = json.loads(done.stdout)
    assert written["shaper"] == shaper
    links = {link["link"]: link["measured"] for link in written["links"]}
    assert list(links) == ["0>1", "1>0", "1>2", "2>0"]
    # Never earlier than asked; how much later depends on what else this machine does.
    assert links["0>1"]["delay_ms"] >= 30
    assert links["1>2"]["delay_ms"] > 8
    assert links["1>2"]["jitter_ms"] > 0.5
    assert links["2>0"]["delay_ms"] >= 5
    if (rate := links["2>0"]["bandwidth"]) is None:
        raise TooLate("the packets that measure bandwidth did not come while they were waited for")
    # A relay that was without a core puts out at once what was due meanwhile.
    in_time("bytes a second, of 8 MB", rate, 9e6)
    assert links["2>0"]["loss"] > 0
    assert done.returncode in (0, 1)
    assert "2>0" in done.stderr


def test_a_throttled_link_queues_a_second_of_traffic(shaper):
    seen = flood(shaper, 400, 0.0, "0>1:10ms,bandwidth=250kB/s")
    assert seen == sorted(seen)
    assert 28 <= len(seen) < 300  # of 8 kB each: 31, and what leaves while they come


def test_packets_keep_their_order(shaper):
    seen = flood(shaper, 200, 0.0005, "0>1:30ms,jitter=10ms")
    assert seen == list(range(200))


@pytest.mark.timing
@pytest.mark.parametrize("unit", ["iterations", "seconds"])
def test_a_link_that_is_slow_for_a_while(shaper, unit, monkeypatch):
    def run(rounds: int, when: str) -> list[float]:
        monkeypatch.setenv("ROUNDS", str(rounds))
        words = ["run", "--shaper", shaper, "--no-measure", "--link", f"0-1:250ms{when}"]
        return echoes(lab(*words, "--", *ECHO).stdout, 1)

    rounds, when = 20, "@4..8"
    if unit == "seconds":  # from when a command of this machine surely runs
        began = time.monotonic()
        run(1, "@1000..")
        first = 2 * (time.monotonic() - began)
        rounds, when = 20 + int((first + 1.5) / 0.05), f"@{first:.1f}s..{first + 1.5:.1f}s"
    times = run(rounds, when)
    slow = "".join("x" if ms >= 500 else " " for ms in times)
    longest = max(slow.split(), key=len, default="")  # for a busy machine adds slow ones
    first = slow.find(longest)
    print(times)
    decided("some iterations in a row that are slow", len(longest) > 1)
    decided("and neither the first nor the last", 0 < first < rounds - len(longest))
    decided("and not most of them", slow.count("x") < rounds / 2)


def test_the_worst_status_is_the_labs(shaper):
    run = ["run", "--shaper", shaper, "--hosts", "2", "--"]
    done = lab(*run, "sh", "-c", "exit $HOST_INDEX")
    assert (done.returncode, "ended with 1 on host 1" in done.stderr) == (1, True)
    done = lab(*run, "no-such-program")
    assert (done.returncode, "no-such-program" in done.stdout) == (127, True)


def test_words_and_variables_of_a_host(shaper):
    script = "echo {index} {ip} $HOST_INDEX $RANK $WORLD_SIZE $PET_NODE_RANK $MASTER_ADDR $$ "
    script += "$NCCL_HOSTID"
    done = lab("run", "--shaper", shaper, "--hosts", "2", "--", "sh", "-c", script)
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0 10.77.0.1 0 0 2 0 10.77.0.1 2 netlab-0",
        "[1] 1 10.77.0.2 1 1 2 1 10.77.0.1 2 netlab-1",
    ]


@pytest.mark.root
def test_programs_of_the_current_folder_are_not_run(tmp_path):
    for program in ("ip", "tc"):
        (tmp_path / program).write_text(f"#!/bin/sh\necho > {tmp_path}/ran\n")
        (tmp_path / program).chmod(0o755)
    words = ["run", "--shaper", "netem", "--hosts", "2", "--", "/bin/true"]
    lab(*words, cwd=tmp_path, env={**os.environ, "PATH": ":/usr/bin", "PYTHONPATH": str(ROOT)})
    assert not (tmp_path / "ran").exists()


@pytest.mark.root
def test_output_that_can_go_nowhere_is_refused_before_the_command_runs(tmp_path):
    with open("/dev/full", "wb") as full:
        words = [*COMMAND, "run", "--hosts", "2", "--json", "--", "touch", str(tmp_path / "ran")]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("it cannot be written: No space left on device")
    assert not (tmp_path / "ran").exists()


def test_a_command_and_its_files_are_of_the_user_who_called_sudo(shaper):
    nobody = pwd.getpwnam("nobody")
    sudo = {**os.environ, "SUDO_UID": str(nobody.pw_uid), "SUDO_GID": str(nobody.pw_gid)}
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        script = f"id -u; echo $USER > /dev/stderr; id -G; echo x > {folder}/$HOST_INDEX"
        words = ["run", "--shaper", shaper, "--hosts", "2", "--", "sh", "-c", script]
        done = lab(*words, env=sudo)
        assert done.returncode == 0, done.stderr
        files = [path.stat() for path in Path(folder).iterdir()]
    assert [(s.st_uid, s.st_gid) for s in files] == 2 * [(nobody.pw_uid, nobody.pw_gid)]
    identity = (nobody.pw_uid, "nobody", nobody.pw_gid)
    assert sorted(done.stdout.splitlines()) == sorted(
        f"[{h}] {word}" for h in (0, 1) for word in identity
    )
    done = lab(*["run", "--hosts", "2", "--", "true"], env={**sudo, "SUDO_UID": "me"})
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "SUDO_UID 'me': " in done.stderr


@pytest.mark.root
def test_results_are_given_to_who_called_sudo(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    nobody = pwd.getpwnam("nobody")
    for name, number in (("SUDO_UID", nobody.pw_uid), ("SUDO_GID", nobody.pw_gid)):
        monkeypatch.setenv(name, str(number))
    give(tmp_path)
    assert (tmp_path.stat().st_uid, tmp_path.stat().st_gid) == (nobody.pw_uid, nobody.pw_gid)


@pytest.mark.long
def test_two_laboratories_at_once(shaper):
    def start(ms: int) -> subprocess.Popen[str]:
        words = ["run", "--shaper", shaper, "--no-measure", "--link", f"0-1:{ms}ms", "--", *ECHO]
        return subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True)

    first, second = start(250), start(5)
    slow, fast = (echoes(process.communicate(timeout=300)[0], 1) for process in (first, second))
    assert min(slow) >= 500
    assert 10 <= min(fast) < min(slow) / 2
