"""One of two ranks of test_emulated_sends.py: rank 0 sends at the end of each iteration.

Rank 1 receives late, and then once more when rank 0 is about to end.
"""

from __future__ import annotations

import os
import time

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron_adaptra.adapter.baseline.stock import EmulatedSends  # noqa: E402
from megatron_adaptra.emulate.links import LinkEmulator  # noqa: E402
from megatron_adaptra.emulate.rules import LinkRule  # noqa: E402

COUNT = 20  # iterations, of one message each
RULES = [LinkRule(0, 1, 0.01, 0, COUNT), LinkRule(0, 1, 0.2, COUNT + 1)]


def send() -> None:
    emulator = LinkEmulator(0, RULES)
    sends = EmulatedSends(emulator, range(2))

    def iteration(number: int) -> None:
        with sends.slow(number):
            ops = [dist.P2POp(dist.isend, torch.full((1000,), float(number)), 1)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    for number in range(COUNT):
        iteration(number)
    emulator.iteration = COUNT
    while emulator.holds(1):
        time.sleep(0.001)
    dist.send(torch.ones(1), 1, tag=1)  # torch has them all, and nobody has received any
    iteration(COUNT + 1)
    sends.close()


def receive() -> None:
    dist.recv(torch.empty(1), 0, tag=1)
    came = []
    for _ in range(COUNT + 1):
        message = torch.empty(1000)
        dist.recv(message, 0)
        came.append(int(message[0]))
    print("came", *came, flush=True)


dist.init_process_group("gloo")
(send, receive)[dist.get_rank()]()
os._exit(0)  # at once: what has not left by now never does
