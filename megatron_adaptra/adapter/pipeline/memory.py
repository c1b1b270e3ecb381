"""Activations that a stage holds: counted in microbatches always, in bytes where asked.

On a GPU the allocator knows the bytes. On a CPU the tensors that autograd has saved are counted:
the graph of every microbatch is walked from its output, and memory that several share counts once.
This takes a while, so it is done only now and then.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron_adaptra.ir.schedule import INPUT_HALF, RECOMPUTED_SHARE
from megatron_adaptra.measure.report import Memory

WHOLE, HALF = 1.0, 1.0 - INPUT_HALF  # in units: a whole microbatch's activations
Key = tuple[int, int, int | None]  # microbatch, chunk and home
Tensors = Iterable[torch.Tensor | None]


class Bytes:
    """A Bytes counts the bytes of activations; this one counts nothing.

    A `key` is a microbatch, its chunk and its home.
    """

    def begins(self) -> None:
        """Prepare to count an op that makes activations."""

    def whole(self, key: Key, output: torch.Tensor, others: Tensors) -> int:
        """Add what a backward from `output` needs, and `others`, for `key`; return their bytes."""
        return 0

    def keep(self, key: Key, kept: Tensors) -> None:
        """Count `kept` alone for `key` from now on: its other tensors are gone."""

    @property
    def peak(self) -> int | None:
        """The most bytes so far; None where they are not counted."""
        return None

    @property
    def free(self) -> int | None:
        """The bytes that the device has left; None where it was not asked."""
        return None


class GraphBytes(Bytes):
    """A GraphBytes counts on a CPU. `ignored`: tensors that exist anyway, such as parameters."""

    peak: int | None = 0

    def __init__(self, ignored: Iterable[torch.Tensor]) -> None:
        self._storages: dict[Key, dict[int, int]] = {}  # address -> bytes
        self._users: Counter[int] = Counter()
        self._bytes = 0
        self._ignored = {t.untyped_storage().data_ptr() for t in ignored}

    def whole(self, key: Key, output: torch.Tensor, others: Tensors) -> int:
        self.keep(key, [*saved_tensors(output.grad_fn), *others])
        return sum(self._storages.get(key, {}).values())

    def keep(self, key: Key, kept: Tensors) -> None:
        before, now = self._storages.pop(key, {}), {}
        for tensor in kept:
            if tensor is not None:
                storage = tensor.untyped_storage()
                now[storage.data_ptr()] = storage.nbytes()
        for address in self._ignored & now.keys():
            del now[address]
        for address, size in now.items():
            self._users[address] += 1
            self._bytes += size if self._users[address] == 1 else 0
        for address, size in before.items():
            self._users[address] -= 1
            self._bytes -= size if self._users[address] == 0 else 0
        if now:
            self._storages[key] = now
        self.peak = max(self.peak or 0, self._bytes)


class AllocatorBytes(Bytes):
    """An AllocatorBytes reads torch's allocator on a GPU, and leaves its records of peaks alone."""

    def __init__(self) -> None:
        self._most = torch.cuda.max_memory_allocated()
        self._before = self._at_start = torch.cuda.memory_allocated()
        self._peak = 0

    def begins(self) -> None:
        self._at_start = torch.cuda.memory_allocated()

    def whole(self, key: Key, output: torch.Tensor, others: Tensors) -> int:
        """Return the bytes since the op began, plus what was received, which was there before."""
        received = {t.data_ptr(): t.nbytes for t in others if t is not None}
        return int(self._look() - self._at_start + sum(received.values()))

    def keep(self, key: Key, kept: Tensors) -> None:
        self._look()

    @property
    def peak(self) -> int | None:
        """The most bytes; a peak inside an op is seen only where it exceeds all before."""
        most = torch.cuda.max_memory_allocated()
        return most - self._before if most > self._most else self._peak

    @property
    def free(self) -> int | None:
        """The free bytes of the device, and those that the allocator holds in reserve."""
        reserve = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0] + reserve)

    def _look(self) -> int:
        now = int(torch.cuda.memory_allocated())
        self._peak = max(self._peak, now - self._before)
        return now


class ActivationMeter:
    """A meter counts the activations in one iteration of one stage with so many `chunks`.

    `peak`: the most, in microbatches. `counted`: bytes are counted, too. `ignored`: see GraphBytes.
    A `key` is a microbatch, its chunk and its home.
    """

    def __init__(self, chunks: int, counted: bool, ignored: Iterable[torch.Tensor]) -> None:
        self._chunks, self.peak = chunks, 0.0
        self._per_microbatch = 0  # bytes of one whole microbatch of one chunk, the most seen
        self._units: dict[Key, float] = {}
        self._bytes = Bytes()
        if counted:
            on_device = torch.device(torch.cuda.current_device()).type == "cuda"
            self._bytes = AllocatorBytes() if on_device else GraphBytes(ignored)

    def begins(self) -> None:
        """Prepare to count an op that makes activations."""
        self._bytes.begins()

    def hold_whole(self, key: Key, output: torch.Tensor, *others: torch.Tensor | None) -> None:
        """Add a forward's activations: what a backward from `output` needs, and `others`."""
        self._per_microbatch = max(self._per_microbatch, self._bytes.whole(key, output, others))
        self._hold_units(key, WHOLE)

    def hold_recomputed(self, key: Key, *kept: torch.Tensor | None) -> None:
        """Add `kept`, all that a forward keeps which will be recomputed."""
        self._bytes.keep(key, kept)
        self._hold_units(key, RECOMPUTED_SHARE)

    def hold_half(self, key: Key, kept: Iterable[torch.Tensor]) -> None:
        """Count `kept` alone for `key`: an input half has left it to the weight half."""
        self._bytes.keep(key, kept)
        self._hold_units(key, HALF)

    def release(self, key: Key) -> None:
        """Remove the activations of `key`, whose backward is over."""
        self._bytes.keep(key, ())
        self._hold_units(key, 0.0)

    def end(self) -> Memory:
        """End the iteration; return its report. Raises RuntimeError if something is held still.

        All chunks of the stage are taken to need the same.
        """
        if self._units:
            raise RuntimeError(f"activations of (microbatch, chunk) {sorted(self._units)} are left")
        of_all = self._chunks * self._per_microbatch
        return Memory(self.peak, self._bytes.peak, of_all, self._bytes.free)

    def _hold_units(self, key: Key, units: float) -> None:
        self._units[key] = units
        if not units:
            del self._units[key]
        self.peak = max(self.peak, round(sum(self._units.values()) / self._chunks, 9))


def with_free_memory(memory: Memory | None) -> Memory | None:
    """Return `memory` with the bytes this machine has left per rank; a GPU's stays as it is."""
    if memory is None or memory.peak_bytes is None or memory.free is not None:
        return memory
    with open("/proc/meminfo") as file:
        rows = [row.split() for row in file if row.startswith("MemAvailable:")]
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return replace(memory, free=1024 * int(rows[0][1]) // ranks if rows else 0)


def saved_tensors(node: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors that the graph behind autograd's `node` has saved for its backward."""
    seen, queue = set(), [node]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        queue += [before for before, _ in node.next_functions]
        try:
            names = [name for name in dir(node) if name.startswith("_saved_")]
            values = [getattr(node, name) for name in names]
            values += getattr(node, "saved_tensors", ())
        except RuntimeError:  # freed by a backward
            continue
        for value in values:
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, torch.Tensor):
                    yield one
