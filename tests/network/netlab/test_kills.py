"""Any process may be killed, in the laboratory or around it: the rest ends, and nothing is left."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from labs import COMMAND, Remains, running, wait_for
from patience import PATIENCE
from processes import outliving

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
SLOW = ["--no-measure", "--link", "0-1:20ms"]


@pytest.fixture
def mark(tmp_path: Path) -> str:
    return str(tmp_path)


def rank(processes: dict[int, str], number: int) -> int:
    """The process of that rank."""
    (found,) = (pid for pid, of in processes.items() if of == str(number))
    return found


@pytest.mark.parametrize(
    ("shaper", "signum"),
    [("relay", signal.SIGKILL), ("relay", signal.SIGTERM), ("netem", signal.SIGINT)],
    indirect=["shaper"],
)
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
