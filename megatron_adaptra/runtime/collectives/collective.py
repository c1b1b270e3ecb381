"""An operation that crosses stages, call by call: by the backend or by an exchange of ours."""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from megatron_adaptra.errors import AdaptraError
from megatron_adaptra.log import log_line
from megatron_adaptra.runtime.collectives.all_gather import AllGather
from megatron_adaptra.runtime.collectives.reduction import Native, Orders, orders_of
from megatron_adaptra.telemetry.step_sync import KEEP

FIRST = 3  # calls after which an operation is taken for one of every iteration
MEASURED = 3  # calls whose median is what a way costs
TRY = 16  # calls after which the other way is measured
RARELY = 256  # it is measured less and less often, but once in so many calls
COSTS = struct.Struct("<dd")
Announced = Sequence[tuple["SmallCollective", torch.Tensor]]


class SmallCollective:
    """One operation of one group, the same one every iteration.

    `members`: global ranks. `op`: of a reduction; without one everybody gets what member `source`
    has.
    """

    def __init__(
        self,
        name: str,
        members: tuple[int, ...],
        op: dist.ReduceOp | None,
        source: int,
        connect: Callable[[], AllGather],
        auto: bool,
    ) -> None:
        self.title = name  # which no other has
        self.stages: tuple[int, ...] = ()  # of the members
        self.name, self.members, self.size, self.auto = name, members, len(members), auto
        self.direct = False
        self.absorbed = False  # will take no time of its own, once another exchange serves it
        self.op, self._source, self._connect = op, source, connect
        self.kept: deque[tuple[torch.Tensor, torch.Tensor]] = deque()  # announced, and its result
        self._calls = 0
        self._again = False  # at once, not at the next try
        self._pause, self._next_try = TRY, TRY
        self._told: tuple[torch.Tensor, list[SmallCollective], list[torch.Tensor]]
        self._spent = 0.0  # seconds of the first half
        self._exchange: AllGather | None = None
        self._orders: Orders | None = None
        self._native_costs: deque[float] = deque(maxlen=MEASURED)
        self._direct_costs: deque[float] = deque(maxlen=MEASURED)

    @property
    def native_cost(self) -> float:
        return median(self._native_costs) if self._native_costs else 0.0

    @property
    def direct_cost(self) -> float:
        return median(self._direct_costs) if self._direct_costs else 0.0

    @property
    def last(self) -> tuple[float, float]:
        """What it took last time, through the backend and through the exchange; -1: never."""
        costs = self._native_costs, self._direct_costs
        backend, direct = (times[-1] if times else -1.0 for times in costs)
        return backend, direct

    @property
    def proven(self) -> bool:
        return self._exchange is not None

    def try_again(self) -> None:
        """What was measured says nothing any more; the other way's turn."""
        self._native_costs.clear()
        self._direct_costs.clear()
        self._again = True
        self._pause, self._next_try = TRY, self._calls + TRY

    def give_kept(self, tensor: torch.Tensor) -> None:
        """What an exchange has brought already. Raises AdaptraError for another value than was
        announced: the others have been told that one."""
        announced, result = self.kept.popleft()
        if not torch.equal(announced.view(torch.uint8), _bytes_of(tensor).view(torch.uint8)):
            raise AdaptraError(
                f"{self.name}: {announced.tolist()} was announced, now it is {tensor.tolist()}; "
                "this Megatron changes a value after its optimizer step: use "
                "--adaptra-small-collectives off"
            )
        tensor.copy_(result.view(tensor.shape))

    def tell(self, tensor: torch.Tensor, native: Native, announced: Announced = ()) -> bool:
        """The first half of what `native(tensor)` does, which waits for nobody; `hear` is the
        other. False if there is none: the backend has done it all."""
        self._calls += 1
        if self._calls == FIRST:
            self._prove(tensor, native)
        other = self.auto and (self._again or self._calls >= self._next_try)
        if other and not self._again:
            self._pause = min(2 * self._pause, RARELY)
            self._next_try = self._calls + self._pause
        self._again = False
        began = time.perf_counter()
        if self._exchange is None or self.direct == other:
            native(tensor)
            self._native_costs.append(time.perf_counter() - began)
            return False
        mine = [_bytes_of(tensor), *(_bytes_of(value) for _, value in announced)]
        costs = torch.frombuffer(
            bytearray(COSTS.pack(self.native_cost, self.direct_cost)), dtype=torch.uint8
        )
        self._exchange.tell(torch.cat([*(value.view(torch.uint8) for value in mine), costs]))
        self._told = tensor, [self, *(way for way, _ in announced)], mine
        self._spent = time.perf_counter() - began
        return True

    def hear(self) -> None:
        """Put the result into the tensor that was told, and keep those that were announced."""
        assert self._exchange is not None
        began = time.perf_counter()
        said = self._exchange.hear()
        self._agree([COSTS.unpack(bytes(s[-COSTS.size :].tolist())) for s in said])
        tensor, ways, mine = self._told
        at = 0
        for way, value in zip(ways, mine, strict=True):
            end = at + value.numel() * value.element_size()
            result = way.result([s[at:end].clone().view(value.dtype) for s in said])
            if way is self:
                tensor.copy_(result.view(tensor.shape))
            else:
                way.kept.append((value, result))
            at = end
        self._direct_costs.append(self._spent + time.perf_counter() - began)

    def _agree(self, figures: Sequence[tuple[float, float]]) -> None:
        """On the way to take from now on: all see the same figures, and conclude the same."""
        if not self.auto:
            return
        backend, direct = (max(column) for column in zip(*figures, strict=True))
        before, self.direct = self.direct, not (backend and direct) or direct < KEEP * backend
        if self.direct != before:
            self._pause, self._next_try = TRY, self._calls + TRY

    def _prove(self, tensor: torch.Tensor, native: Native) -> None:
        """Collective: find the backend's order, and make sure that all have found the same."""
        exchange = self._connect()
        verdict = b"fine"
        if self.op is not None:
            self._orders = orders_of(native, self.op, tensor, exchange.me, self.size)
            verdict = self._orders.digest() if self._orders is not None else b"none"
        said = exchange.swap(torch.frombuffer(bytearray(verdict), dtype=torch.uint8))
        self.direct = verdict != b"none" and all(bytes(s.tolist()) == verdict for s in said)
        if self.direct:
            self._exchange = exchange
            self._native_costs.clear()  # the first calls have made connections
            for _ in range(MEASURED if self.auto else 0):
                copy, began = tensor.clone(), time.perf_counter()
                native(copy)
                self._native_costs.append(time.perf_counter() - began)
        elif exchange.me == 0:
            log_line(
                f"{self.name} of {tensor.numel()} {tensor.dtype} over {self.size} ranks "
                "stays with the backend: no order of ours gives its result"
            )

    def result(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """From what each member has."""
        if self.op is None:
            return values[self._source]
        assert self._orders is not None
        return self._orders.reduce(self.op, values)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Flat, on the CPU, and not the caller's own memory."""
    return tensor.detach().cpu().flatten().clone()
