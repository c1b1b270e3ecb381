"""What a training feels of strangers who call one of its ranks: `engine_strangers.py --out FOLDER`.

The demo without slow links, in which stock Megatron and ours take turns within each iteration. In
every second stretch strangers come to the listener of one rank as fast as it lets them
in: silent ones, garbage, halves and copies of handshakes. They are nice, for on other machines they
would take no processor from the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_adaptra.demo.launch import launch, prepare
from megatron_adaptra.demo.options import DemoOptions

STRANGER = Path(__file__).parents[1] / "tests" / "network" / "transport" / "stranger.py"
FIRST, SETTLE = 10, 2  # iterations that are not counted: of the run, of a stretch
NICE = 19
ANSWER, HELLO, PROOF = 128, 84, 32
MAGIC = b"adaptra\n\1\0\1\0"


def listeners() -> list[str]:
    """HOST:PORT of those sockets of this machine that refuse a bad hello as an endpoint does."""
    listed = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    found = []
    for line in listed.splitlines():
        host, _, port = line.split()[3].rpartition(":")
        with contextlib.suppress(OSError):
            with socket.create_connection((host, int(port)), 0.5) as one:
                one.sendall(bytes(HELLO))
                if one.recv(ANSWER, socket.MSG_WAITALL)[:9] == b"\1no hello":
                    found.append(f"{host}:{port}")
    return found


class Strangers:
    """Some who visit and some who flood, while they may."""

    def __init__(self, where: str) -> None:
        recorded = MAGIC + os.urandom(HELLO + PROOF - len(MAGIC))
        self._all = [
            subprocess.Popen(
                [sys.executable, str(STRANGER), how, where, recorded.hex()],
                stdout=subprocess.PIPE,
            )
            for how in ("visits", "flood")
        ]
        for one in self._all:
            assert one.stdout is not None
            one.stdout.readline()  # it is there
            os.setpriority(os.PRIO_PROCESS, one.pid, NICE)
        self.come(False)

    def come(self, yes: bool) -> None:
        for one in self._all:
            one.send_signal(signal.SIGCONT if yes else signal.SIGSTOP)

    def end(self) -> None:
        for one in self._all:
            one.kill()
            one.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--stretch", type=int, default=15, help="iterations")
    words = parser.parse_args()
    config = Path(words.out + ".yaml")
    config.write_text("transport: engine\n")
    count = FIRST + 2 * words.turns * words.stretch
    options = DemoOptions(
        stages=words.stages, iterations=count, emulate=False, config=str(config), out=words.out
    )
    strangers: list[Strangers] = []
    times: dict[bool, dict[str, list[float]]] = {False: {}, True: {}}

    def on_progress(step: dict[str, Any]) -> None:
        """After an iteration."""
        if not strangers:
            strangers.append(Strangers(listeners()[0]))
        turn, place = divmod(step["iteration"] - FIRST, words.stretch)
        if turn >= 0 and place >= SETTLE:
            for arm, ms in step["ms"].items():
                times[turn % 2 == 1].setdefault(arm, []).append(ms)
        if place == words.stretch - 1:  # also of the iterations that are not counted
            strangers[0].come(turn % 2 == 0)

    out = prepare(options)
    try:
        launch(options, out, on_progress)
    finally:
        for one in strangers:
            one.end()
    counts = re.findall(r"(\d+) strangers", out.joinpath("ranks.log").read_text())
    print(f"{', '.join(counts)} strangers; medians of {len(times[True]['stock'])} iterations, ms")
    for arm in times[True]:
        quiet, beset = (statistics.median(times[yes][arm]) for yes in (False, True))
        spread = statistics.quantiles(times[False][arm], n=4)
        print(f"{arm}: {quiet:.1f} without ({spread[0]:.1f} to {spread[2]:.1f}), {beset:.1f} with,"
              f" {beset / quiet:.3f}")  # fmt: skip
    print(json.dumps({str(yes): arms for yes, arms in times.items()}), file=sys.stderr)


main()
