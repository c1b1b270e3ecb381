"""One small collective that comes every iteration: through the backend, or through an AllGather."""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from megatron_adaptra.base.errors import AdaptraError
from megatron_adaptra.device.base import Device, Mark
from megatron_adaptra.execute.small.all_gather import AllGather
from megatron_adaptra.execute.small.reduction import Native, Orders, orders_of
from megatron_adaptra.measure.step_sync import KEEP

FIRST = 3  # calls after which an operation is taken for one of every iteration
MEASURED = 3  # calls whose median is the cost
FIRST_RETRY = 16  # calls after which the path that is not in use is measured again, ...
LAST_RETRY = 256  # ... then less and less often, but once in so many calls
COSTS = struct.Struct("<dd")
Prefetch = Sequence[tuple["SmallCollective", torch.Tensor]]
# Seconds; None while they are not known, and for ever where the device does not report it.
Taken = Callable[[], float | None]
_Reduce = Callable[[Sequence[torch.Tensor]], torch.Tensor]  # from the values of all members


class SmallCollective:
    """A small collective runs one operation of one group, with tensors of one shape.

    `name`: of the function in torch.distributed; with `number` unique, and the same on all members.
    `members`: global ranks. `stages`: of the members. `op`: of a reduction; None: all get
    what the member of index `source` has. `connect`: opens an AllGather, collectively. `mode`,
    `say`, `clock`: see SmallCollectives.
    """

    def __init__(
        self,
        name: str,
        number: int,
        members: tuple[int, ...],
        stages: tuple[int, ...],
        op: dist.ReduceOp | None,
        source: int,
        connect: Callable[[], AllGather],
        mode: str,
        say: Callable[[str], None],
        clock: Device,
    ) -> None:
        self.name, self.title = name, f"{name} {number}"
        self.members, self.stages = members, stages
        self.direct = False  # uses the AllGather
        self.hidden = False  # takes no time of its own: another one's wait covers it
        # Values that were sent ahead with another operation, and their results.
        self.prefetched: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._op, self._source, self._connect, self._mode = op, source, connect, mode
        self._say, self._clock = say, clock
        self._untimed: deque[Taken] = deque(maxlen=2 * MEASURED)  # of the backend
        self._calls = 0
        self._tried = self._watched = False  # the self-test has run; the backend was timed before
        self._measure_now = False  # at the next call, not at the next retry
        self._pause, self._next_retry = FIRST_RETRY, FIRST_RETRY
        self._start_seconds = 0.0
        self.all_gather: AllGather | None = None  # once it is known to give the backend's results
        self._reduce: _Reduce = lambda values: values[source]
        # The tensor that gets the result of the one that was started, and what was sent for it;
        # None where no `wait` is still to come.
        self.in_flight: tuple[torch.Tensor, list[tuple[SmallCollective, torch.Tensor]]] | None
        self.in_flight = None
        self._native_costs: deque[float] = deque(maxlen=MEASURED)
        self._direct_costs: deque[float] = deque(maxlen=MEASURED)

    @property
    def costs(self) -> tuple[float, float]:
        """Median seconds by the backend, and by the AllGather; 0 if not measured."""
        native, direct = self._native_costs or (0.0,), self._direct_costs or (0.0,)
        return median(native), median(direct)

    @property
    def last_seconds(self) -> tuple[float, float]:
        """The seconds of the last call by the backend, and by the AllGather; -1 for no call."""
        costs = self._native_costs, self._direct_costs
        native, direct = (seconds[-1] if seconds else -1.0 for seconds in costs)
        return native, direct

    @property
    def kept(self) -> bool:
        """True where it stays with the backend, as no order of ours gives its results."""
        return self._tried and self.all_gather is None

    def measure_again(self, watched: bool = False) -> None:
        """Forget the costs, for links have changed, and measure both paths at the next calls.

        `watched`: the backend was timed over the links as they are, so that its costs stay.
        """
        if not watched:
            self._native_costs.clear()
        self._direct_costs.clear()
        self._measure_now = not watched
        self._pause, self._next_retry = FIRST_RETRY, self._calls + FIRST_RETRY

    def take_prefetched(self, tensor: torch.Tensor) -> None:
        """Put a result that is here already into `tensor`.

        Raises AdaptraError if `tensor` is not what was sent: all others have used that value.
        """
        sent, result = self.prefetched.popleft()
        if not torch.equal(sent.view(torch.uint8), _copy_of(tensor).view(torch.uint8)):
            raise AdaptraError(
                f"{self.name}: {sent.tolist()} was sent ahead, now it is {tensor.tolist()}; "
                "this Megatron changes a value after its optimizer step: use "
                "--adaptra-small-collectives off"
            )
        tensor.copy_(result.view(tensor.shape))

    def watch(self, tensor: torch.Tensor, native: Native) -> Taken:
        """Leave it to the backend. Returns a function that gives its seconds."""
        self._calls += 1
        self._watched = True
        return self._through_backend(native, tensor)

    def start(self, tensor: torch.Tensor, native: Native, prefetch: Prefetch = ()) -> bool:
        """Begin what `native(tensor)` does, and return without waiting; `wait` ends it.

        Do not call it while it is in flight.

        `prefetch`: operations to come with their values, which are sent along. Returns False if
        there is nothing to wait for: the backend has done it all.
        """
        self._calls += 1
        if self._calls >= FIRST and not self._tried:
            self._self_test(tensor, native)
        retry = self._mode == "auto" and (self._measure_now or self._calls >= self._next_retry)
        if retry and not self._measure_now:
            self._pause = min(2 * self._pause, LAST_RETRY)
            self._next_retry = self._calls + self._pause
        self._measure_now = False
        self._read_times()
        if self.all_gather is None or self.direct == retry:
            self._through_backend(native, tensor)
            return False
        sent = [(self, _copy_of(tensor)), *((other, _copy_of(value)) for other, value in prefetch)]
        began = time.perf_counter()  # a device has made the values by now
        costs = torch.frombuffer(bytearray(COSTS.pack(*self.costs)), dtype=torch.uint8)
        self.all_gather.start(torch.cat([*(value.view(torch.uint8) for _, value in sent), costs]))
        self.in_flight = tensor, sent
        self._start_seconds = time.perf_counter() - began
        return True

    def wait(self) -> None:
        """Put the result into the tensor that was started, and keep what was prefetched.

        Raises PeerLost as AllGather does.
        """
        assert self.all_gather is not None
        assert self.in_flight is not None
        (tensor, sent), self.in_flight = self.in_flight, None
        began = time.perf_counter()
        payloads = self.all_gather.wait()
        self._choose([COSTS.unpack(bytes(p[-COSTS.size :].tolist())) for p in payloads])
        at = 0
        for other, value in sent:
            end = at + value.numel() * value.element_size()
            result = other._reduce([p[at:end].clone().view(value.dtype) for p in payloads])
            if other is self:
                tensor.copy_(result.view(tensor.shape))
            else:
                other.prefetched.append((value, result))
            at = end
        self._direct_costs.append(self._start_seconds + time.perf_counter() - began)

    def _through_backend(self, native: Native, tensor: torch.Tensor) -> Taken:
        """Go through the backend; on a device, what that takes is known later, if at all."""
        taken = timed(self._clock, lambda: native(tensor))
        self._untimed.append(taken)
        self._read_times()
        return taken

    def _read_times(self) -> None:
        while self._untimed and (seconds := self._untimed[0]()) is not None:
            self._native_costs.append(seconds)
            self._untimed.popleft()

    def _choose(self, costs: Sequence[tuple[float, float]]) -> None:
        """Choose the path from now on: all members see the same costs, and choose the same."""
        if self._mode != "auto":
            return
        native, direct = (max(column) for column in zip(*costs, strict=True))
        before, self.direct = self.direct, not (native and direct) or direct < KEEP * native
        if self.direct != before:
            self._pause, self._next_retry = FIRST_RETRY, self._calls + FIRST_RETRY

    def _self_test(self, tensor: torch.Tensor, native: Native) -> None:
        """Find the backend's order, and check that all have found the same. Collective."""
        self._tried = True
        all_gather = self._connect()
        found, size = b"fine", len(self.members)
        if (op := self._op) is not None:
            orders = orders_of(native, op, tensor, all_gather.me, size)
            if orders is None and self._mode == "fixed":
                orders = Orders(size, torch.zeros(tensor.numel(), dtype=torch.int16))
            found = b"none"
            if orders is not None:
                found, reduce = orders.digest(), orders.reduce
                self._reduce = lambda values: reduce(op, values)
        everywhere = all_gather.run(torch.frombuffer(bytearray(found), dtype=torch.uint8))
        self.direct = found != b"none" and all(bytes(f.tolist()) == found for f in everywhere)
        if self.direct:
            self.all_gather = all_gather
            if not self._watched:
                self._native_costs.clear()  # the first calls have made connections
                self._untimed.clear()
                for _ in range(MEASURED if self._mode == "auto" else 0):
                    self._through_backend(native, tensor.clone())
        elif all_gather.me == 0:
            self._say(
                f"{self.name} of {tensor.numel()} {tensor.dtype} over {size} ranks "
                "stays with the backend: no order of ours gives its result"
            )


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat copy on the CPU, never the caller's own memory."""
    return tensor.detach().cpu().flatten().clone()


def timed(clock: Device, call: Callable[[], object]) -> Taken:
    """Run `call` between two marks of `clock`, whose errors are dropped; those of `call` are not.

    Returns a function that gives the seconds between the marks.
    """
    marks: list[Mark] = []
    with contextlib.suppress(Exception):
        marks.append(clock.mark())
    call()
    with contextlib.suppress(Exception):
        marks.append(clock.mark())

    def taken() -> float | None:
        with contextlib.suppress(Exception):
            begin, end = (mark.at() for mark in marks)
            if begin is not None and end is not None:
                return end - begin
        return None

    return taken
