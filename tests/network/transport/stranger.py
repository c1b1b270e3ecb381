"""A process that does not know the job's secret: `stranger.py visits|flood WHERE HEX`.

WHERE: `HOST:PORT`, or `@NAME` for an abstract Unix name. HEX: a handshake that it has recorded. It
comes until it is killed, and says nothing, garbage, half of a handshake, or what it has recorded;
a flood comes as fast as it can, and says nothing. The newest of its connections stay open.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import time
from collections import deque

from megatron_adaptra.base.processes import die_with_parent

KEPT, PAUSE = 300, 0.01
HELLO = 84


def call(where: str) -> socket.socket:
    if where.startswith("@"):
        one = socket.socket(socket.AF_UNIX)
        one.connect("\0" + where[1:])
        return one
    host, port = where.split(":")
    return socket.create_connection((host, int(port)))


def main(how: str, where: str, recorded: bytes) -> None:
    die_with_parent()
    open_ones: deque[socket.socket] = deque()
    print("on", flush=True)
    while True:
        with contextlib.suppress(OSError):
            one = call(where)
            open_ones.append(one)
            if how == "visits":
                garbage = os.urandom(random.randrange(1, 1000))
                one.sendall(random.choice((b"", garbage, recorded[:HELLO], recorded)))
        if len(open_ones) > KEPT:
            open_ones.popleft().close()
        if how == "visits":
            time.sleep(PAUSE)


main(sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3]))
