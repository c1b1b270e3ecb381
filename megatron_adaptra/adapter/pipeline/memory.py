"""What a stage holds of activations: counted in microbatches always, in bytes where asked.

On a GPU the allocator knows the bytes. On a CPU nobody does, so the tensors that autograd has saved
are counted: the graph of every microbatch is walked from its output, and memory that several share
counts once. That takes a while, so it is done now and then only.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron_adaptra.ir.timeline import INPUT_HALF, LIGHT
from megatron_adaptra.telemetry.probe import Memory

WHOLE, HALF = 1.0, 1.0 - INPUT_HALF  # in units: a whole microbatch's activations
Key = tuple[int, int]  # microbatch and chunk


class ActivationMeter:
    """One iteration of one stage with so many `chunks`.

    `peak`: microbatches' activations; `peak_bytes` is None where bytes are not counted.
    `count_bytes`: count them on a CPU; on a GPU they are always known. `ignored`: tensors that are
    there anyway, such as parameters. A `key` is a microbatch and its chunk.
    """

    def __init__(self, chunks: int, count_bytes: bool, ignored: Iterable[torch.Tensor]) -> None:
        self._share, self._count_bytes = 1.0 / chunks, count_bytes
        self.peak = 0.0
        self.peak_bytes: int | None = None
        self.per_microbatch = 0  # bytes of one whole microbatch of one chunk, the most seen
        self._units: dict[Key, float] = {}
        self._storages: dict[Key, dict[int, int]] = {}  # address -> bytes
        self._users: Counter[int] = Counter()
        self._bytes = 0
        self._ignored: set[int] = set()
        self._on_gpu = torch.device(torch.cuda.current_device()).type == "cuda"
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self._before = self._at_start = torch.cuda.memory_allocated()
            self.peak_bytes = 0
        elif count_bytes:
            self._ignored = {t.untyped_storage().data_ptr() for t in ignored}
            self.peak_bytes = 0

    def begins(self) -> None:
        """Before an op that makes activations."""
        if self._on_gpu:
            self._at_start = torch.cuda.memory_allocated()

    def hold_whole(self, key: Key, output: torch.Tensor, *others: torch.Tensor | None) -> None:
        """A forward's activations are there: what a backward from `output` needs, and `others`."""
        if self._count_bytes and not self._on_gpu:
            self._hold_bytes(key, [*saved_tensors(output.grad_fn), *others])
            size = sum(self._storages[key].values())
            self.per_microbatch = max(self.per_microbatch, size)
        elif self._on_gpu:
            size = torch.cuda.memory_allocated() - self._at_start
            self.per_microbatch = max(self.per_microbatch, size)
        self._hold_units(key, WHOLE)

    def hold_light(self, key: Key, *kept: torch.Tensor | None) -> None:
        """A forward has kept `kept` alone; it will be recomputed."""
        self._hold_bytes(key, kept)
        self._hold_units(key, LIGHT)

    def hold_half(self, key: Key, kept: Iterable[torch.Tensor]) -> None:
        """The input half of a backward has left `kept` to the weight half."""
        self._hold_bytes(key, kept)
        self._hold_units(key, HALF)

    def release(self, key: Key) -> None:
        """The backward is over."""
        self._hold_bytes(key, ())
        self._hold_units(key, 0.0)

    def end(self) -> None:
        """The iteration is over. Raises RuntimeError if something is held still."""
        if self._on_gpu:
            self.peak_bytes = torch.cuda.max_memory_allocated() - self._before
        if self._units:
            raise RuntimeError(f"activations of (microbatch, chunk) {sorted(self._units)} are left")

    def memory(self, chunks: int) -> Memory:
        """For the report; all `chunks` of the stage are taken to need the same."""
        free = None
        if self._on_gpu:
            free = torch.cuda.mem_get_info()[0]
        return Memory(self.peak, self.peak_bytes, chunks * self.per_microbatch, free)

    def _hold_units(self, key: Key, units: float) -> None:
        self._units[key] = units
        if not units:
            del self._units[key]
        self.peak = max(self.peak, round(self._share * sum(self._units.values()), 9))

    def _hold_bytes(self, key: Key, tensors: Iterable[torch.Tensor | None]) -> None:
        if not self._count_bytes or self._on_gpu:
            return
        before, now = self._storages.pop(key, {}), {}
        for tensor in tensors:
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
        self.peak_bytes = max(self.peak_bytes or 0, self._bytes)


def with_free_memory(memory: Memory | None) -> Memory | None:
    """`memory` with what this machine could still give to a rank, where a CPU's was counted."""
    if memory is None or memory.peak_bytes is None or memory.free is not None:
        return memory
    with open("/proc/meminfo") as file:
        rows = [row.split() for row in file if row.startswith("MemAvailable:")]
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return memory._replace(free=1024 * int(rows[0][1]) // ranks if rows else 0)


def saved_tensors(node: Any) -> Iterator[torch.Tensor]:
    """All tensors that the graph behind autograd's `node` has saved for its backward."""
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
