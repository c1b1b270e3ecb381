"""One of two ranks, each a host: 200 messages of 1 MiB both ways, and in the middle a fault.

Takes JSON: `folder` (of the rendezvous), `timeouts` by rank, `count` of messages, `window` of a
connection (bytes, 0 for the kernel's), seconds of `silence` after which a path is given up, and of
the fault `rank`, `what` (down, stop, kill, loss, hole, or flap) and `seconds`. Says in JSON what
has arrived, what has failed, and what was recorded.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hole import dig, fill

from benchmarks.folder_rendezvous import FolderRendezvous
from megatron_adaptra.netlab.network import INTERFACE
from megatron_adaptra.transport.engine.endpoint import CONNECTIONS, Endpoint

SIZE, TAGS = 1 << 20, 2
MIDDLE = 60  # messages that have arrived when the fault begins
PAUSE = 0.01  # seconds between those that follow
PATIENCE = 200  # seconds
FLAPS, UP = 2, 1.5  # seconds of a flapping link between two failures: less than a trial
_SET_FLAGS, _UP = 0x8914, 0x41


def block(rank: int, number: int) -> bytearray:
    """What message `number` of `rank` holds."""
    word = struct.pack("<II", rank, number)
    return bytearray(word * (SIZE // len(word)))


def set_link(up: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        flags = _UP if up else 0
        fcntl.ioctl(one, _SET_FLAGS, struct.pack("16sh22x", INTERFACE.encode(), flags))


def address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def fault(rendezvous: FolderRendezvous, what: str, seconds: float) -> None:
    if what == "kill":
        rendezvous.put("begun", "")
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":  # another process has to let it go on
        rendezvous.put("begun", "")
        script = f"sleep {seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", script], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        change = {"loss": lose, "hole": pass_large}.get(what, set_link)
        for _ in range(FLAPS if what == "flap" else 1):
            change(False)
            rendezvous.put("begun", "")
            threading.Event().wait(seconds)
            change(True)
            threading.Event().wait(UP)


def lose(over: bool) -> None:
    """The laboratory reads this; its rule is for iteration 2."""
    print(f"iteration {3 if over else 2}:", flush=True)


def pass_large(yes: bool) -> None:
    """This rank's connections, and what its listener accepts."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
            if one.family == socket.AF_INET:
                fill(one) if yes else dig(one)


def until(condition: Callable[[], bool], end: float, what: str) -> None:
    """Wait for what has no event to wait for, up to a moment."""
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def main(job: dict[str, Any]) -> None:
    me = int(os.environ["RANK"])
    peer, count = 1 - me, job["count"]
    rendezvous = FolderRendezvous(Path(job["folder"]))
    here, timeout = os.environ["HOST_IP"], job["timeouts"][me]
    log = Path(job["folder"]) / "connections.jsonl"
    silence = job["silence"]
    if window := job["window"]:
        Path("/proc/sys/net/ipv4/tcp_rmem").write_text(f"4096 {window} {window}")
    endpoint = Endpoint(me, here, f"host {me}", rendezvous, timeout, log, silence=silence)
    endpoint.connect([peer], 60)
    engine = endpoint.engine
    got = [bytearray(SIZE) for _ in range(count)]
    places = [address(memory) for memory in got]
    receives = [engine.receive(peer, n % TAGS, at, SIZE) for n, at in enumerate(places)]
    one_more = bytearray(SIZE)
    never = [engine.receive(peer, tag, address(one_more), SIZE) for tag in range(TAGS)]
    sends = []
    for n in range(count):
        content = block(me, n)
        sends.append(engine.send(peer, n % TAGS, address(content), SIZE))
        if n == MIDDLE and job["rank"] == me:
            receives[n].wait(PATIENCE)
            job_of = (rendezvous, job["what"], job["seconds"])
            threading.Thread(target=fault, args=job_of, daemon=True).start()
        if n == MIDDLE:  # what follows is in the middle of it, on both sides
            begun = time.monotonic() + PATIENCE
            until(lambda: rendezvous.get("begun") is not None, begun, "no fault has begun")
        if n > MIDDLE:
            time.sleep(PAUSE)
    error, end = "", time.monotonic() + PATIENCE
    for work in (*receives, *sends):
        if not error:
            error = work.error() if work.wait(end - time.monotonic()) else "it hangs"
    records = endpoint.records.last
    # Without any connection the peer is silent, and only then can it be back.
    if not error and sum(event.what == "lost" for event in records) >= CONNECTIONS:
        until(lambda: any(event.what == "back" for event in records), end, "nothing has come back")
    result = {
        "rank": me, "error": error,
        "wrong": [n for n in range(count) if got[n] != block(peer, n)],
        "more": sum(work.done() and not work.error() for work in never),
        "again": engine.counts(peer).again,
        "records": [(event.what, event.side, event.why) for event in records],
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    rendezvous.put(f"through/{me}", "")  # both have to be before one of them goes
    if job["what"] != "kill":
        through = time.monotonic() + PATIENCE
        until(
            lambda: rendezvous.get(f"through/{peer}") is not None, through, f"{peer} is not through"
        )
    endpoint.close()


main(json.loads(sys.argv[1]))
