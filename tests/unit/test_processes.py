"""A child ends with its parent, and nothing that a command has started outlives it."""

import os
import select
import subprocess
import sys

import pytest
from patience import PATIENCE

from megatron_adaptra.base.processes import started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")

PARENT = """
import os, subprocess, sys
from megatron_adaptra.base.processes import die_with_parent
child = "import os, time; os.write({write}, b'up'); time.sleep(600)"
subprocess.Popen(
    [sys.executable, "-c", child], preexec_fn=die_with_parent, pass_fds=[{write}]
).wait()
"""


def test_child_dies_with_its_parent():
    """The pipe closes when the last process that holds it has ended."""
    read, write = os.pipe()
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(write=write)], pass_fds=[write])
    os.close(write)
    try:
        assert select.select([read], [], [], PATIENCE)[0]
        assert os.read(read, 2) == b"up"
        parent.kill()
        parent.wait(PATIENCE)
        assert select.select([read], [], [], PATIENCE)[0]
        assert os.read(read, 1) == b""
    finally:
        parent.kill()
        os.close(read)


# A stubborn child in a session of its own, and one that has lost its parent.
FAMILY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
os.write({write}, b"u")
while True:
    signal.pause()
"""
OWNER = """
import os, sys
from megatron_adaptra.base.processes import become_subreaper, started
become_subreaper()
with started([sys.executable, "-c", {family!r}], {grace}, pass_fds=[{write}]) as process:
    os.close({write})
    sys.stdin.readline()
print("ended", process.returncode, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("grace", [0.0, 0.3])
def test_a_stubborn_family_is_gone_at_the_end_of_the_block(grace):
    """The pipe closes when the last process that holds it has ended."""
    read, write = os.pipe()
    family = FAMILY.format(write=write)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(family=family, grace=grace, write=write)],
        pass_fds=[write], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write)
    with owner, os.fdopen(read, "rb", 0) as pipe:
        assert pipe.read(1) + pipe.read(1) == b"uu"
        owner.stdin.write("end\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "ended -9\n"
        assert select.select([pipe], [], [], 0)[0]
        assert pipe.read() == b""
        owner.communicate("\n", timeout=PATIENCE)


def test_a_command_that_ends_by_itself_keeps_its_status_and_the_others_live():
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with started([sys.executable, "-c", "raise SystemExit(3)"], 5.0) as process:
            assert process.wait(PATIENCE) == 3
        assert process.returncode == 3
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"\n", timeout=PATIENCE)
    assert bystander.returncode == 0
