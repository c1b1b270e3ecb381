"""Any process may be killed, in the laboratory or around it: the rest ends, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from labs import COMMAND, Remains, lab, running, wait_for
from patience import PATIENCE
from processes import outliving
from transport.ranks import until

from megatron_adaptra.netlab import lab as laboratory
from megatron_adaptra.netlab.lab import Lab

# Each rank waits in gloo for a message that the other does not send.
GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(f"joined {tensor.item():g}", flush=True)
dist.recv(tensor, 1 - dist.get_rank())
"""
# Host 0 prints without an end. When more than pipes hold has gone, it says so over the network.
TALKS = """
import os, socket, threading
if os.environ["RANK"] == "0":
    printed, enough = 0, threading.Event()
    def talk():
        global printed
        while True:
            printed += os.write(1, b"x" * 1023 + b"\\n")
            if printed > 1 << 19: enough.set()
    threading.Thread(target=talk, daemon=True).start()
    enough.wait()
    with socket.create_server((os.environ["HOST_IP"], 5000)) as server:
        with server.accept()[0] as peer: peer.sendall(b"0")
        threading.Event().wait()
else:
    while True:
        try:
            with socket.create_connection((os.environ["MASTER_ADDR"], 5000)) as peer: peer.recv(1)
            break
        except ConnectionRefusedError: pass
    open(os.sys.argv[1], "w").write("received")
"""
SLOW = ["--no-measure", "--link", "0-1:20ms"]
DEMO = [
    sys.executable, "-m", "megatron_adaptra", "demo", "--netlab", "--stages", "2",
    "--microbatches", "2", "--hidden-size", "32", "--seq-length", "16",
]  # fmt: skip


@pytest.fixture
def mark(tmp_path: Path) -> str:
    return str(tmp_path)


def rank(processes: dict[int, str], number: int, word: str = "") -> int:
    """The process of that rank; with a word on its command line, where there are several."""
    (found,) = (
        pid for pid, of in processes.items()
        if of == str(number) and word in Path(f"/proc/{pid}/cmdline").read_text()
    )  # fmt: skip
    return found


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_laboratory(shaper, signum, mark):
    remains = Remains(mark)
    # Processes that nobody waits for, too.
    script = (
        f"echo x > /dev/shm/{remains.segment}; "
        "sleep 300 & setsid sh -c 'sleep 300; :' $0 & echo up; wait"
    )
    command = [*COMMAND, "run", "--shaper", shaper, "--hosts", "3", *SLOW]
    with running([*command, "--", "sh", "-c", script, mark]) as process:
        wait_for(process, "] up", 3)
        assert len(remains.see(hosts=3)) > 9  # an init, a shell and its child on each
        process.send_signal(signum)
        process.wait(300)
    remains.assert_none()


def test_nobody_reads_what_is_printed(shaper, mark, tmp_path):
    """The network goes on, and the laboratory ends when it gets its signal."""
    remains, received = Remains(mark), tmp_path / "received"
    os.mkfifo(received)
    words = ["run", "--shaper", shaper, *SLOW, "--", sys.executable, "-c", TALKS, str(received)]
    quiet = ["sh", "-c", 'exec "$@" 2> /dev/null', "sh"]  # else its errors are not read, either
    with running([*quiet, *COMMAND, *words]) as process:
        assert received.read_text() == "received"
        remains.see(hosts=2)
        process.terminate()
        assert process.wait(300) == 128 + signal.SIGTERM
    remains.assert_none()


@pytest.mark.cold
def test_a_rank_while_another_waits_for_it(shaper, mark):
    remains = Remains(mark)
    command = [*COMMAND, "run", "--shaper", shaper, *SLOW, "--", sys.executable, "-c", GLOO, mark]
    with running(command) as process:
        wait_for(process, "joined 2", 2)
        os.kill(rank(remains.see(hosts=2), 1), signal.SIGKILL)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGKILL
    assert "ended with 1 on host 0" in output
    assert "ended with 137 on host 1" in output
    remains.assert_none()


@pytest.mark.cold
@pytest.mark.parametrize("host", [0, 1])
def test_a_hosts_torchrun(shaper, host, mark, tmp_path):
    remains = Remains(mark)
    script = tmp_path / "rank.py"
    script.write_text(GLOO)
    command = [*COMMAND, "run", "--shaper", shaper, *SLOW, "--", sys.executable, "-m"]
    with running([*command, "torch.distributed.run", str(script)]) as process:
        wait_for(process, "joined 2", 2)
        os.kill(rank(remains.see(hosts=2), host, "torch.distributed.run"), signal.SIGKILL)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGKILL
    assert f"ended with 137 on host {host}" in output
    assert f"ended with 1 on host {1 - host}" in output
    remains.assert_none()


def test_the_shell_that_started_the_laboratory(shaper, mark):
    remains = Remains(mark)
    words = ["run", "--shaper", shaper, *SLOW, "--", "sh", "-c", "echo up; sleep 300", mark]
    # A shell that waits, and has more to do.
    with running(["sh", "-c", '"$@"; true', "sh", *COMMAND, *words]) as shell:
        wait_for(shell, "] up", 2)
        remains.see(hosts=2)
        shell.kill()
        output, _ = shell.communicate(timeout=300)  # which ends when the laboratory does
    assert "nohup" in output
    remains.assert_none()


def test_the_shell_of_a_laboratory_that_measures(shaper, mark):
    remains = Remains(mark)
    slow = ["--shaper", shaper, "--link", "0-1:60s"]  # of which no host says anything for a while
    words = ["run", *slow, "--", "true", mark]
    with running(["sh", "-c", '"$@"; true', "sh", *COMMAND, *words]) as shell:
        wait_for(shell, "2 hosts;", 1)
        remains.see(hosts=2)
        shell.kill()
        output, _ = shell.communicate(timeout=300)
    assert "nohup" in output
    remains.assert_none()


def test_nohup_lets_a_laboratory_go_on(shaper, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    inside = f'echo up; test {{index}} = 1 || read word < {gate}; echo "went on: $word"'
    words = ["run", "--shaper", shaper, "--hosts", "2", "--", "sh", "-c", inside]
    with running(["sh", "-c", 'nohup "$@"; true', "sh", *COMMAND, *words]) as shell:
        wait_for(shell, "] up", 2)
        shell.kill()
        shell.wait(300)
        gate.write_text("later\n")
        output, _ = shell.communicate(timeout=300)
    assert "[0] went on: later" in output


@pytest.mark.trains
@pytest.mark.cold
@pytest.mark.root
def test_the_demo_that_started_the_laboratory(mark):
    pytest.importorskip("megatron.core")
    if lab("run", "--hosts", "2", "--", "true").returncode:
        pytest.skip("no laboratory here")
    remains = Remains(mark)
    with running([*DEMO, "--iterations", "1000", "--out", mark]) as process:
        wait_for(process, "iteration 8:", 1)
        processes = remains.see(hosts=2)
        assert {"0", "1"} <= set(processes.values())
        process.kill()
    remains.assert_none()


@pytest.mark.long
def test_nobody_reads_the_progress_of_the_demo(tmp_path):
    """Its network goes on, and so does the training."""
    pytest.importorskip("megatron.core")
    if lab("run", "--hosts", "2", "--", "true").returncode:
        pytest.skip("no laboratory here")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"full"):
            pass
    os.set_blocking(writer, True)
    out = tmp_path / "out"
    demo = [*DEMO, "--iterations", "20", "--delay", "20ms", "--out", str(out)]
    with subprocess.Popen(demo, stdout=subprocess.DEVNULL, stderr=writer) as process:
        os.close(writer)
        try:
            until(out.joinpath("summary.json").exists, "the results of a training")
            with open(reader, "rb") as errors:
                assert b"iteration 8:" in errors.read()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_a_host():
    def end_it(host: int, line: bytes) -> None:
        if b"up" in line and host == 1:
            os.kill(network._hosts[1].pid, signal.SIGKILL)

    with Lab(2, []) as network:
        script = "echo up; test {index} = 0 || sleep 300"
        statuses = network.run(["sh", "-c", script], os.environ, end_it)
    assert statuses == [0, 128 + signal.SIGKILL]


@pytest.mark.parametrize(
    ("end", "grace", "status"),
    [("signal.SIG_DFL", PATIENCE, signal.SIGTERM), ("signal.SIG_IGN", 0.5, signal.SIGKILL)],
)
def test_a_rank_that_waits_for_ever_is_ended(end, grace, status, monkeypatch, mark, tmp_path):
    monkeypatch.setattr(laboratory, "FAILED_GRACE", 0.5)
    monkeypatch.setattr(laboratory, "GRACE", grace)
    ready = tmp_path / "ready"  # rank 1 is killed when rank 0 waits
    os.mkfifo(ready)
    waiting = (
        f"import signal; signal.signal(signal.SIGTERM, {end}); "
        f"open('{ready}', 'w').close(); signal.pause()"
    )
    script = f"test {{index}} = 1 && read -r _ <{ready}; test {{index}} = 1 && kill -9 $$; "
    script += f'exec "$0" -c "{waiting}" {mark}'
    with Lab(2, []) as network:
        statuses = network.run(["sh", "-c", script, sys.executable], os.environ, lambda *_: None)
    assert statuses == [128 + status, 128 + signal.SIGKILL]
    assert outliving(mark) == {}
