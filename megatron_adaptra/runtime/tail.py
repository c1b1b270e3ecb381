"""The end of an iteration: collectives that cross stages outside the pipeline, in one delay each.

While installed, `torch.distributed.all_reduce`, `broadcast` and `barrier` look at their group. Over
ranks of several stages, and with little to say, they go through an Exchange; everything else goes
to torch as ever. Results are those of the backend to the last bit: the order of its sums is found
out by a self-test against it, and what no order explains stays with the backend.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.errors import AdaptraError, PeerLost
from megatron_adaptra.runtime.exchange import Exchange
from megatron_adaptra.runtime.reduction import KNOWN, Native, Orders, orders_of
from megatron_adaptra.runtime.watchdog import Watchdog, say
from megatron_adaptra.telemetry.probe import Crossing
from megatron_adaptra.telemetry.tails import KEEP

SMALL = 1024  # bytes that every member may have to say to every other
PAIR = 64 << 20  # the same for two members, such as the two ends of a tied embedding
MOST_MEMBERS = 64
FIRST = 3  # calls after which an operation is taken for one of every iteration
MEASURED = 3  # calls whose median is what a way costs
TRY = 16  # every so many calls the other way is measured
SLACK = 64  # bytes of a message for what was announced; a digest fits, too
_COSTS = struct.Struct("<dd")
FUNCTIONS = ("all_reduce", "broadcast", "barrier")


class Tail:
    """`stage_of[rank]`: of every global rank. `mode`: on, or auto for what is faster, measured."""

    def __init__(
        self, stage_of: Sequence[int], mode: str, timeout: float, watchdog: Watchdog
    ) -> None:
        self._stage_of, self._auto, self._timeout = tuple(stage_of), mode == "auto", timeout
        self._watchdog = watchdog
        self.active = True  # while False all goes to torch; the same on all ranks
        self._native: dict[str, Any] = {}
        self._groups: dict[tuple[int, ...], Any] = {}
        self._spanning: dict[Any, tuple[int, ...]] = {}
        self._announced: dict[tuple[int, ...], list[tuple[Way, torch.Tensor]]] = {}
        self._ways: dict[Any, Way] = {}
        self._journal: list[Crossing] = []
        self.absorbing = False  # see Way.absorbed
        # Asked before an all-reduce that crosses stages; True if it has taken care of the tensor.
        self.before: Callable[[Way, torch.Tensor], bool] | None = None

    def take_journal(self) -> list[Crossing]:
        """What has crossed stages since the last call."""
        journal, self._journal = self._journal, []
        return journal

    def install(self) -> None:
        """Raises RuntimeError if another Tail is installed."""
        if hasattr(dist.all_reduce, "adaptra"):
            raise RuntimeError("the collectives of torch.distributed are taken over already")
        ours = {
            "all_reduce": self._all_reduce,
            "broadcast": self._broadcast,
            "barrier": self._barrier,
        }
        for name in FUNCTIONS:
            self._native[name] = getattr(dist, name)

            def stand_in(*args: Any, _ours: Any = ours[name], **kwargs: Any) -> Any:
                try:
                    return _ours(*args, **kwargs)
                except PeerLost as error:
                    raise PeerLost(self._watchdog.describe(f": {error}")) from error

            stand_in.adaptra = True  # type: ignore[attr-defined]
            setattr(dist, name, stand_in)

    def undo(self) -> None:
        for name, function in self._native.items():
            setattr(dist, name, function)
        self._native = {}
        self._ways, self._groups = {}, {}

    def costs(self) -> dict[str, tuple[float, float, bool]]:
        """Per operation: seconds of the backend, seconds of the exchange, whether it is in use."""
        return {
            way.name: (way.native_cost, way.direct_cost, way.direct) for way in self._ways.values()
        }

    def try_again(self, ranks: Collection[int]) -> None:
        """Links have changed: measure both ways anew. Call it on all of these ranks before the same
        call; operations that others take part in are left alone."""
        for way in self._ways.values():
            if set(way.members) <= set(ranks):
                way.try_again()

    def announce(self, values: Sequence[tuple[torch.Tensor, dist.ReduceOp]], group: Any) -> None:
        """All-reduces that will follow over the group, in any order: one exchange serves them all.

        The next exchange over it carries these values along. Whoever all-reduces one of them then
        has the result at once, of equal ones in their order. What nobody asks for is dropped at the
        next announcement. All members have to announce alike.
        """
        ways = [(self._way("all_reduce", tensor, op, group), tensor) for tensor, op in values]
        for way in self._ways.values():
            way.kept.clear()
        known = [(way, tensor) for way, tensor in ways if way is not None and way.proven]
        self._announced[self._members(group)] = known

    # What stands in for torch's functions; the arguments are theirs.

    def _all_reduce(
        self, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        native = self._native["all_reduce"]
        known = str(op) in KNOWN and not async_op and isinstance(tensor, torch.Tensor)
        way = self._way("all_reduce", tensor, op, group) if known else None
        if way is None:
            return native(tensor, op=op, group=group, async_op=async_op)
        if self.before is not None and self.before(way, tensor):
            return None

        def plain(tensor: torch.Tensor) -> None:
            native(tensor, op=op, group=group)

        if not way.kept:
            self._run(way, tensor, plain, self._announced.pop(self._members(group), []))
        else:
            now = time.monotonic()
            way.give_kept(tensor)
            self._journal.append(Crossing(way.title, now, time.monotonic(), way.last[0], 0.0))
        return None

    def _broadcast(
        self, tensor: Any, src: Any = None, group: Any = None, async_op: bool = False,
        group_src: Any = None,
    ) -> Any:  # fmt: skip
        native = self._native["broadcast"]
        rest = {} if group_src is None else {"group_src": group_src}
        way = None
        if not async_op and src is not None and isinstance(tensor, torch.Tensor):
            way = self._way("broadcast", tensor, src, group)
        if way is None:
            return native(tensor, src, group=group, async_op=async_op, **rest)
        return self._run(way, tensor, lambda t: native(t, src, group=group))

    def _barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        native = self._native["barrier"]
        nothing = torch.empty(0, dtype=torch.uint8)
        way = None if async_op else self._way("barrier", nothing, None, group)
        if way is None:
            return native(group=group, async_op=async_op, device_ids=device_ids)
        return self._run(way, nothing, lambda _: native(group=group))

    def _run(
        self,
        way: Way,
        tensor: torch.Tensor,
        native: Native,
        announced: Sequence[tuple[Way, torch.Tensor]] = (),
    ) -> None:
        start = time.monotonic()
        way.run(tensor, native, announced)
        way.absorbed |= self.absorbing
        backend, direct = way.last
        self._journal.append(
            Crossing(way.title, start, time.monotonic(), backend, 0.0 if way.absorbed else direct)
        )

    def _way(self, name: str, tensor: torch.Tensor, detail: Any, group: Any) -> Way | None:
        """Where this call goes if it crosses stages and is small enough."""
        # A checkpoint's threads have an order of their own.
        if not self.active or threading.current_thread() is not threading.main_thread():
            return None
        members = self._members(group)
        nbytes = tensor.numel() * tensor.element_size()
        if not members or nbytes > (PAIR if len(members) == 2 else SMALL):
            return None
        key = (name, str(detail), members, tensor.dtype, tensor.numel())
        way = self._ways.get(key)
        if way is None:
            op = detail if name == "all_reduce" else None
            source = members.index(detail) if name == "broadcast" else 0

            def connect() -> Exchange:
                return self._open(members, nbytes + _COSTS.size + SLACK)

            number = len(self._ways)
            way = self._ways[key] = Way(name, members, op, source, connect, self._auto)
            way.title = f"{name} {number}"
        return way

    def _members(self, group: Any) -> tuple[int, ...]:
        """Global ranks of the group if it is ours to serve, else nobody."""
        group = dist.group.WORLD if group is None else group
        if group not in self._spanning:
            self._spanning[group] = self._look_up(group)
        return self._spanning[group]

    def open_exchange(self, way: Way, nbytes: int) -> Exchange:
        """One more between the ranks of a way. Collective."""
        return self._open(way.members, nbytes)

    def _look_up(self, group: Any) -> tuple[int, ...]:
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return ()
        members = tuple(dist.get_process_group_ranks(group))
        stages = {self._stage_of[rank] for rank in members}
        # What a GPU's backend takes cannot be timed from here.
        timed = not self._auto or dist.get_backend(group) == "gloo"
        return members if len(stages) > 1 and len(members) <= MOST_MEMBERS and timed else ()

    def _open(self, members: tuple[int, ...], nbytes: int) -> Exchange:
        """Made by its members alone, together."""
        if members not in self._groups:
            store = dist.distributed_c10d._get_default_store()
            key = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
            group = dist.ProcessGroupGloo(
                dist.PrefixStore(f"adaptra/tail/{key}", store),
                members.index(dist.get_rank()), len(members), timedelta(minutes=10),
            )  # fmt: skip
            self._groups[members] = [group, 0]
        group, channel = self._groups[members]
        self._groups[members][1] += 1
        names = [f"stage {self._stage_of[rank]} (rank {rank})" for rank in members]
        return Exchange(group, names, nbytes, self._timeout, channel)


class Way:
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
        connect: Callable[[], Exchange],
        auto: bool,
    ) -> None:
        self.title = name  # which no other has
        self.name, self.members, self.size, self.auto = name, members, len(members), auto
        self.direct = False
        self.absorbed = False  # will take no time of its own, once another exchange serves it
        self.op, self._source, self._connect = op, source, connect
        self.kept: deque[tuple[torch.Tensor, torch.Tensor]] = deque()  # announced, and its result
        self._calls = 0
        self._again = False
        self._exchange: Exchange | None = None
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

    def give_kept(self, tensor: torch.Tensor) -> None:
        """What an exchange has brought already. Raises AdaptraError for another value than was
        announced: the others have been told that one."""
        announced, result = self.kept.popleft()
        if not torch.equal(announced.view(torch.uint8), _bytes_of(tensor).view(torch.uint8)):
            raise AdaptraError(
                f"{self.name}: {announced.tolist()} was announced, now it is {tensor.tolist()}; "
                "this Megatron changes a value after its optimizer step: use --adaptra-tail off"
            )
        tensor.copy_(result.view(tensor.shape))

    def run(
        self,
        tensor: torch.Tensor,
        native: Native,
        announced: Sequence[tuple[Way, torch.Tensor]] = (),
    ) -> None:
        """Do what `native(tensor)` does, this way or that way."""
        self._calls += 1
        if self._calls == FIRST:
            self._prove(tensor, native)
        other = self.auto and (self._calls % TRY == 0 or self._again)
        self._again = False
        began = time.perf_counter()
        if self._exchange is None or self.direct == other:
            native(tensor)
            self._native_costs.append(time.perf_counter() - began)
            return
        ways = [self, *(way for way, _ in announced)]
        mine = [_bytes_of(tensor), *(_bytes_of(value) for _, value in announced)]
        results = self._tell(mine, ways)
        tensor.copy_(results[0].view(tensor.shape))
        for way, value, result in zip(ways[1:], mine[1:], results[1:], strict=True):
            way.kept.append((value, result))
        self._direct_costs.append(time.perf_counter() - began)

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
            say(
                f"{self.name} of {tensor.numel()} {tensor.dtype} over {self.size} ranks "
                "stays with the backend: no order of ours gives its result"
            )

    def _tell(self, mine: Sequence[torch.Tensor], ways: Sequence[Way]) -> list[torch.Tensor]:
        """Every value's result, by one exchange; agree on the way to take from now on."""
        assert self._exchange is not None
        costs = bytearray(_COSTS.pack(self.native_cost, self.direct_cost))
        parts = [value.view(torch.uint8) for value in mine]
        said = self._exchange.swap(torch.cat([*parts, torch.frombuffer(costs, dtype=torch.uint8)]))
        if self.auto:  # all see the same figures, and draw the same conclusion
            figures = [_COSTS.unpack(bytes(s[-_COSTS.size :].tolist())) for s in said]
            backend, direct = (max(column) for column in zip(*figures, strict=True))
            self.direct = not (backend and direct) or direct < KEEP * backend
        results, at = [], 0
        for way, value, part in zip(ways, mine, parts, strict=True):
            end = at + part.numel()
            results.append(way.result([s[at:end].clone().view(value.dtype) for s in said]))
            at = end
        return results

    def result(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """From what each member has."""
        if self.op is None:
            return values[self._source]
        assert self._orders is not None
        return self._orders.reduce(self.op, values)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Flat, on the CPU, and not the caller's own memory."""
    return tensor.detach().cpu().flatten().clone()
