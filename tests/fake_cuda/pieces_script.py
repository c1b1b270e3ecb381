"""A large message from a fake GPU to another one over a wire of a known rate, whole and in pieces.

    python tests/fakes/cuda/machine.py --to-host-gbps 0.5 --to-device-gbps 0.5 \\
        python tests/fake_cuda/pieces_script.py by-hand 1 64 100 3 64 16 4 1

After the name and the number of ranks: MiB of the message, MB/s of the wire, runs, and MiB of the
pieces to compare. Both ends are of one process. The wire is a connection over loopback that the
kernel paces; what it takes alone is measured beside the messages, since a busy machine does not
hold the rate.
"""

from __future__ import annotations

import ctypes
import json
import random
import socket
import sys
import time
from collections.abc import Callable

from calls import NON_BLOCKING, Library, driver

from megatron_adaptra.transport.engine import _native

PATIENCE = 100.0  # seconds
PACED = 47  # SO_MAX_PACING_RATE
MIB = 1 << 20


class Side:
    """A GPU, its stream, its memory for the message, an engine with one connection."""

    def __init__(self, cuda: Library, rank: int, nbytes: int) -> None:
        self.cuda, self.rank, self.nbytes = cuda, rank, nbytes
        self.context = int(cuda.made("cuDevicePrimaryCtxRetain", rank))
        cuda.cuCtxSetCurrent(self.context)
        self.stream = int(cuda.made("cuStreamCreateWithPriority", NON_BLOCKING, 0))
        self.memory = int(cuda.made("cuMemAlloc_v2", nbytes))
        self.device, self.engine = _native.Device.open(rank), _native.Engine()
        self.engine.add_peer(1 - rank, f"rank {1 - rank}")
        self.pinned = _native.Pinned(self.device, self.engine, 1 << 40)
        self.block = self.engine.take(nbytes)  # for what goes over the wire alone

    def messages(self, piece: int) -> _native.DeviceMessages:
        name, peer = f"rank {self.rank}", 1 - self.rank
        return _native.DeviceMessages(
            self.engine, self.device, self.pinned, piece << 32, [peer], name, piece
        )

    def put(self, content: bytes) -> None:
        self.cuda.cuCtxSetCurrent(self.context)
        self.cuda.cuMemcpyHtoDAsync_v2(self.memory, content, len(content), self.stream)
        self.cuda.cuStreamSynchronize(self.stream)

    def get(self) -> bytes:
        self.cuda.cuCtxSetCurrent(self.context)
        content = ctypes.create_string_buffer(self.nbytes)
        self.cuda.cuMemcpyDtoHAsync_v2(content, self.memory, self.nbytes, self.stream)
        self.cuda.cuStreamSynchronize(self.stream)
        return content.raw


def connected(sides: list[Side], rate: float) -> None:
    """One connection; what rank 0 sends is paced to `rate` bytes a second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
    ends[0].setsockopt(socket.SOL_SOCKET, PACED, round(rate))
    for side, end in zip(sides, ends, strict=True):
        side.engine.add_tcp(1 - side.rank, end.detach(), 2)


def wire_alone(sides: list[Side]) -> float:
    """Seconds from the send of what is on the host until it is on the other host."""
    there, here = sides
    work = here.engine.receive(0, 1, here.block.address, here.nbytes)
    begun = time.monotonic()
    sent = there.engine.send(1, 1, there.block.address, there.nbytes)
    assert work.wait(PATIENCE)
    assert sent.wait(PATIENCE)
    assert not work.error()
    return time.monotonic() - begun


def message(sides: list[Side], both: list[_native.DeviceMessages], content: bytes) -> float:
    """Seconds from the send until a stream of the receiver has passed the message."""
    there, here = sides
    there.put(content)
    here.put(bytes(len(content)))
    work = both[1].receive(0, 1, here.memory, here.nbytes, here.stream)
    begun = time.monotonic()
    sent = both[0].send(1, 1, there.memory, there.nbytes, there.stream, None)
    assert work.wait(PATIENCE)
    both[1].join(work, here.stream)
    here.cuda.cuStreamSynchronize(here.stream)
    took = time.monotonic() - begun
    assert sent.wait(PATIENCE)
    assert not work.error(), work.error()
    assert here.get() == content, "the message is another one"
    return took


def compared(cuda: Library, mib: int, rate: float, runs: int, pieces: list[int]) -> object:
    """Seconds, by runs, which take turns: of the wire alone, and of messages in such pieces.

    `ratios`: of the quickest run to that of the wire alone; what a busy machine adds is in others.
    """
    sides = [Side(cuda, rank, mib * MIB) for rank in (0, 1)]
    connected(sides, rate)
    all_of = {piece: [side.messages(piece * MIB) for side in sides] for piece in pieces}
    seed = random.randrange(1 << 30)
    print(f"content of seed {seed}", file=sys.stderr)
    content = random.Random(seed).randbytes(mib * MIB)
    wire_alone(sides)
    for both in all_of.values():  # memory is pinned
        message(sides, both, content)
    turns: dict[str, Callable[[], float]] = {"wire": lambda: wire_alone(sides)}
    for piece, both in all_of.items():
        turns[str(piece)] = lambda both=both: message(sides, both, content)  # type: ignore[misc]
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(runs):
        for name, turn in turns.items():
            taken[name].append(turn())
    for both in all_of.values():
        for one in both:
            assert one.close(PATIENCE)
    del both, one, all_of
    turns.clear()
    for side in sides:
        side.engine.close("the test is over")
        side.pinned.close(side.device)
        assert side.device.close(PATIENCE) == ""
    ratios = {name: min(times) / min(taken["wire"]) for name, times in taken.items()}
    return {"seconds": taken, "ratios": ratios}


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[3:]]
    mib, mbps, runs, *pieces = numbers
    print(json.dumps(compared(driver(), mib, mbps * 1e6, runs, pieces)))
