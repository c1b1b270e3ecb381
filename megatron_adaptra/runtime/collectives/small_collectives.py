"""The end of an iteration: collectives that cross stages outside the pipeline, in one delay each.

While installed, `torch.distributed.all_reduce`, `broadcast` and `barrier` look at their group. Over
ranks of several stages, and with little to say, they go through an AllGather; everything else goes
to torch as ever. Results are those of the backend to the last bit: the order of its sums is found
out by a self-test against it, and what no order explains stays with the backend.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.errors import PeerLost
from megatron_adaptra.runtime.collectives.all_gather import AllGather
from megatron_adaptra.runtime.collectives.collective import COSTS, Announced, SmallCollective
from megatron_adaptra.runtime.collectives.hierarchical import Links
from megatron_adaptra.runtime.collectives.reduction import KNOWN, Native
from megatron_adaptra.runtime.watchdog import Watchdog
from megatron_adaptra.telemetry.probe import CollectiveSpan

SMALL = 1024  # bytes that every member may have to say to every other
PAIR = 64 << 20  # the same for two members, such as the two ends of a tied embedding
MOST_STAGES = 64  # each tells each other
MOST_MEMBERS = 1024  # what a stage has heard, and passes on to its members, is a MiB or so
SLACK = 64  # bytes of a message for what was announced; a digest fits, too
FUNCTIONS = ("all_reduce", "broadcast", "barrier")
# Asked when an operation's value has been told: what to do when its result is there, if that may be
# later, at the end of the next all-reduce; else None.
Deferred = Callable[[SmallCollective, torch.Tensor], Callable[[], None] | None]


class SmallCollectives:
    """`stage_of[rank]`: of every global rank. `mode`: on, or auto for what is faster, measured."""

    def __init__(
        self, stage_of: Sequence[int], mode: str, timeout: float, watchdog: Watchdog
    ) -> None:
        self._stage_of, self._auto, self._timeout = tuple(stage_of), mode == "auto", timeout
        self._watchdog = watchdog
        self.active = True  # while False all goes to torch; the same on all ranks
        self._native: dict[str, Any] = {}
        self._groups: dict[tuple[int, ...], Links] = {}
        self._spanning: dict[Any, tuple[int, ...]] = {}
        self._announced: dict[tuple[int, ...], list[tuple[SmallCollective, torch.Tensor]]] = {}
        self._ways: dict[Any, SmallCollective] = {}
        self._journal: list[CollectiveSpan] = []
        self.absorbing = False  # see SmallCollective.absorbed
        self.barriers = True  # False: they are left out; the same on all ranks
        self.later: Sequence[Deferred] = ()
        self._owed: list[tuple[SmallCollective, Callable[[], None]]] = []  # told, not heard

    def take_spans(self) -> list[CollectiveSpan]:
        """What has crossed stages since the last call."""
        journal, self._journal = self._journal, []
        return journal

    def since(self, moment: float) -> list[CollectiveSpan]:
        """What has crossed stages since then."""
        return [c for c in self._journal if c.start >= moment]

    def spare(self, collectives: Sequence[CollectiveSpan]) -> None:
        """Take note of operations that are not needed here, but that stock Megatron does."""
        now = time.monotonic()
        self._journal += [c._replace(start=now, end=now, direct=0.0) for c in collectives]

    def install(self) -> None:
        """Raises RuntimeError if another SmallCollectives is installed."""
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
        self._ways, self._groups, self._owed = {}, {}, []

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
        self._announced[self.members(group)] = known

    # What stands in for torch's functions; the arguments are theirs.

    def _all_reduce(
        self, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        native = self._native["all_reduce"]
        known = str(op) in KNOWN and not async_op and isinstance(tensor, torch.Tensor)
        way = self._way("all_reduce", tensor, op, group) if known else None
        if way is None:
            work = native(tensor, op=op, group=group, async_op=async_op)
            self.settle()
            return work

        def plain(tensor: torch.Tensor) -> None:
            native(tensor, op=op, group=group)

        if not way.kept:
            self._run(way, tensor, plain, self._announced.pop(self.members(group), []))
        else:
            now = time.monotonic()
            way.give_kept(tensor)
            self._note(way, now, 0.0)
        return None

    def settle(self) -> None:
        """Hear what could wait. Raises what those raise who wanted to know."""
        owed, self._owed = self._owed, []
        for way, _ in owed:
            start = time.monotonic()
            way.hear()
            self._note(way, start, 0.0)
        for _, finish in owed:
            finish()

    @property
    def owes(self) -> bool:
        """Whether a result is still to come."""
        return bool(self._owed)

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
        if not self.barriers:
            self._note(way, time.monotonic(), 0.0)
            return None
        return self._run(way, nothing, lambda _: native(group=group))

    def _run(
        self,
        way: SmallCollective,
        tensor: torch.Tensor,
        native: Native,
        announced: Announced = (),
    ) -> None:
        start = time.monotonic()
        told = way.tell(tensor, native, announced)
        asked = (ask(way, tensor) for ask in self.later) if told else ()
        if (finish := next((f for f in asked if f is not None), None)) is not None:
            way.absorbed = True
            self._owed.append((way, finish))
            return
        if told:
            way.hear()
        way.absorbed |= self.absorbing
        self._note(way, start, 0.0 if way.absorbed else way.last[1])
        self.settle()

    def _note(self, way: SmallCollective, start: float, direct: float) -> None:
        crossing = CollectiveSpan(
            way.title, start, time.monotonic(), way.last[0], direct, way.stages
        )
        self._journal.append(crossing)

    def _way(
        self, name: str, tensor: torch.Tensor, detail: Any, group: Any
    ) -> SmallCollective | None:
        """Where this call goes if it crosses stages and is small enough."""
        # A checkpoint's threads have an order of their own.
        if not self.active or threading.current_thread() is not threading.main_thread():
            return None
        members = self.members(group)
        nbytes = tensor.numel() * tensor.element_size()
        if not members or nbytes > (PAIR if len(members) == 2 else SMALL):
            return None
        key = (name, str(detail), members, tensor.dtype, tensor.numel())
        way = self._ways.get(key)
        if way is None:
            op = detail if name == "all_reduce" else None
            source = members.index(detail) if name == "broadcast" else 0

            def connect() -> AllGather:
                return self._open(members, nbytes + COSTS.size + SLACK)

            number = len(self._ways)
            way = self._ways[key] = SmallCollective(name, members, op, source, connect, self._auto)
            way.title = f"{name} {number}"
            way.stages = tuple(sorted({self._stage_of[rank] for rank in members}))
        return way

    def members(self, group: Any) -> tuple[int, ...]:
        """Global ranks of the group if it is ours to serve, else nobody."""
        group = dist.group.WORLD if group is None else group
        if group not in self._spanning:
            self._spanning[group] = self._look_up(group)
        return self._spanning[group]

    def open_all_gather(self, members: tuple[int, ...], nbytes: int) -> AllGather:
        """One more between these global ranks, who all call it."""
        start = time.monotonic()
        exchange = self._open(members, nbytes)
        self._journal.append(CollectiveSpan("connect", start, time.monotonic(), 0.0, 0.0))
        return exchange

    def _look_up(self, group: Any) -> tuple[int, ...]:
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return ()
        members = tuple(dist.get_process_group_ranks(group))
        stages = {self._stage_of[rank] for rank in members}
        # What a GPU's backend takes cannot be timed from here.
        timed = not self._auto or dist.get_backend(group) == "gloo"
        few = 1 < len(stages) <= MOST_STAGES and len(members) <= MOST_MEMBERS
        return members if few and timed else ()

    def _open(self, members: tuple[int, ...], nbytes: int) -> AllGather:
        """Made by its members alone, together."""
        if members not in self._groups:
            key = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
            base = dist.distributed_c10d._get_default_store()
            store = dist.PrefixStore(f"adaptra/small_collectives/{key}", base)
            stages = [self._stage_of[rank] for rank in members]
            names = [f"stage {s} (rank {rank})" for s, rank in zip(stages, members, strict=True)]
            me = members.index(dist.get_rank())
            self._groups[members] = Links(store, me, stages, names, self._timeout)
        return self._groups[members].open(nbytes)
