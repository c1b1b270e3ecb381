"""What a thread has waited for a core, as the kernel counts it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import in_time

from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.measure import core_wait
from megatron_adaptra.measure.core_wait import CoreWait
from megatron_adaptra.measure.probe import Probe

counted = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not count it"
)
BUSY = "import os\nos.sched_setaffinity(0, [{}])\nprint(flush=True)\nwhile True: pass"


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@contextlib.contextmanager
def shared_core() -> Iterator[None]:
    """Run on a core of which another process wants all."""
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    with subprocess.Popen(
        [sys.executable, "-c", BUSY.format(core)], stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            os.sched_setaffinity(0, [core])
            yield
        finally:
            os.sched_setaffinity(0, before)
            other.kill()


@counted
def test_who_shares_a_core_waits_for_it() -> None:
    with shared_core():
        queued = CoreWait()
        began, waited = time.monotonic(), queued()
        burn(0.4)
        took, waited = time.monotonic() - began, queued() - waited
    assert 0.1 <= waited <= took - 0.4 + 0.02


@counted
def test_a_wait_for_a_core_in_a_call_for_messages_is_the_hosts() -> None:
    probe = Probe(1)
    probe.begin(0, stock=True)
    with shared_core():
        probe.asks()
        burn(0.2)
        probe.answered()
    probe.op_begins()
    probe.op_ends(Op(Kind.F, 0))
    assert probe.pipeline_ends().ops[-1].lag >= 0.05


@counted
def test_who_sleeps_does_not() -> None:
    queued = CoreWait()
    began, waited = time.monotonic(), queued()
    time.sleep(0.2)
    in_time("to wait for a core", queued() - waited, time.monotonic() - began - 0.2 + 1e-3)


@counted
def test_each_thread_has_its_own() -> None:
    queued = CoreWait()
    queued()
    found: list[int] = []
    opened = threading.Barrier(2)

    def other() -> None:
        queued()
        assert queued._opened is not None
        found.append(queued._opened[1])
        opened.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    opened.wait(60)
    thread.join()
    assert queued._opened is not None
    assert queued._opened[1] != found[0]


@counted
def test_a_forked_process_reads_that_of_its_own_thread() -> None:
    queued = CoreWait()
    queued()
    assert queued._opened is not None
    before = queued._opened
    child = os.fork()
    if not child:
        queued()
        os._exit(queued._opened is None or queued._opened[0] != os.getpid())
    assert os.waitpid(child, 0)[1] == 0
    assert queued._opened == before


@pytest.mark.parametrize("content", [None, "", "12", "a b c"])
def test_where_the_kernel_does_not_count_nothing_is_known(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "schedstat").write_text(content)
    monkeypatch.setattr(core_wait, "_FILE", str(tmp_path / "schedstat"))
    assert CoreWait()() is None
