"""The end of an iteration: collectives that cross stages outside the pipeline, in one delay each.

The callables of `stand_ins` take the place of torch.distributed's `all_reduce`, `broadcast` and
`barrier`. They look at their group: over ranks of several stages, and with few bytes, a call goes
through an AllGather; everything else goes to torch as ever. Results are those of the backend to the
last bit: the order of its sums is found by a self-test against it, and what no order explains stays
with the backend.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.base.log import log_line
from megatron_adaptra.device.base import HOST, Device
from megatron_adaptra.execute.small.all_gather import AllGather
from megatron_adaptra.execute.small.collective import COSTS, Prefetch, SmallCollective, timed
from megatron_adaptra.execute.small.hierarchical import Links, descriptors_of
from megatron_adaptra.execute.small.reduction import KNOWN, Native
from megatron_adaptra.execute.watchdog import Watchdog
from megatron_adaptra.measure.iteration_record import CollectiveSpan
from megatron_adaptra.transport.wire import Wire

SMALL = 1024  # bytes: the most that every member may send to every other
PAIR = 64 << 20  # the same for two members, such as the two ends of a tied embedding
MOST_STAGES = 64  # each sends to each
MOST_MEMBERS = 1024  # what the leader of a stage passes on to its members is a MiB or so
PREFETCH_BYTES = 64  # of a message, for values that are sent ahead with it; a digest fits, too
FUNCTIONS = ("all_reduce", "broadcast", "barrier")  # of torch.distributed
# Called when an operation has been started. Returns what to call when its result is there, if the
# caller can go on without it until the end of the next all-reduce; else None.
DeferHook = Callable[[SmallCollective, torch.Tensor], Callable[[], None] | None]


class SmallCollectives:
    """A rank's small collectives serve its calls that cross stages with few bytes.

    Args:
        stage_of: the stage of every global rank, by rank.
        mode: "on": through an AllGather; "auto" for the faster path, backend or AllGather, as
            measured; "fixed": on, with sums in the order of the members where the backend's is not
            found.
        timeout: seconds that one call waits for each other member to send its value, or to take
            this rank's, or, in the first call of a group, to connect; then PeerLost names it.
        watchdog: adds to a PeerLost what this rank was doing.
        say: logs one sentence.
        wire: makes the connections of a group, when its first call comes.
        job: keeps them apart from those of other instances in this job; the same on all ranks.
        most: file descriptors that the connections of one group may take; the same on all ranks. A
            group that needs more is left to the backend.
        within: the global ranks that are `active` at the same time; None for all. Groups with other
            ranks are left to the backend.
        clock: the device whose memory the values are in. On a GPU the backend keeps all calls above
            SMALL bytes; on the host two members may exchange up to PAIR.
    """

    def __init__(
        self,
        stage_of: Sequence[int],
        mode: str,
        timeout: float,
        watchdog: Watchdog,
        say: Callable[[str], None] = log_line,
        *,
        wire: Wire,
        job: str = "",
        most: int = 1 << 30,
        within: Collection[int] | None = None,
        clock: Device = HOST,
    ) -> None:
        self._stage_of, self._mode, self._timeout = tuple(stage_of), mode, timeout
        self._watchdog, self._say = watchdog, say
        self._within, self._clock = None if within is None else frozenset(within), clock
        self._job, self._wire, self._most = job, wire, most
        self._process = os.getpid()
        # While False all goes to torch; the same on all ranks. It is timed then where `timed` is
        # set, so that its cost is known when it is needed.
        self.active, self.timed = True, clock.behind
        # While False all goes to torch, unwatched: a save or an evaluation may take long, and is as
        # stock does it. The same on all ranks at each call.
        self.in_step = True
        # Called before a collective that is torch's because it is in no step.
        self.outside: Callable[[], None] = lambda: None
        self.hiding = False  # see SmallCollective.hidden: true of what runs meanwhile
        self.barriers = True  # False: they are left out; the same on all ranks
        self.defer_hooks: Sequence[DeferHook] = ()
        self._native: dict[str, Any] = {}
        self._links: dict[tuple[int, ...], Links] = {}
        self._members: dict[Any, tuple[int, ...]] = {}  # by group
        self._collectives: dict[Any, SmallCollective] = {}
        self._to_prefetch: dict[tuple[int, ...], Prefetch] = {}
        # Started and deferred: their results are still to come.
        self.pending: list[tuple[SmallCollective, Callable[[], None]]] = []
        self._spans: list[CollectiveSpan] = []

    def take_spans(self) -> list[CollectiveSpan]:
        """Return the spans of the operations since the last call, and forget them."""
        spans, self._spans = self._spans, []
        return spans

    def spans_since(self, moment: float) -> list[CollectiveSpan]:
        """Return the spans that have begun since `moment`, in seconds of the monotonic clock."""
        return [c for c in self._spans if c.start >= moment]

    def record_skipped(self, collectives: Sequence[CollectiveSpan]) -> None:
        """Record operations that are left out here, but that stock Megatron does."""
        now = time.monotonic()
        self._spans += [c._replace(start=now, end=now, direct=0.0) for c in collectives]

    def stand_ins(self, native: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """Return a stand-in for each of FUNCTIONS, by name; `native`: torch's own, by name.

        A stand-in takes torch's arguments. Raises PeerLost, which names what this rank waited for.
        """
        self._native = dict(native)
        ours = {
            "all_reduce": self._naming_peers(self._all_reduce),
            "broadcast": self._naming_peers(self._broadcast),
            "barrier": self._naming_peers(self._barrier),
        }
        return {name: functools.wraps(native[name])(function) for name, function in ours.items()}

    def _naming_peers(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            try:
                if not self.in_step and self._by_training:
                    self.outside()
                return function(*args, **kwargs)
            except PeerLost as error:
                raise PeerLost(self._watchdog.describe(f": {error}")) from error

        return stand_in

    def close(self) -> None:
        """End all connections, once the stand-ins are no longer in place."""
        for links in self._links.values():
            links.close()
        self._collectives, self._links, self.pending = {}, {}, []

    def measure_again(self, ranks: Collection[int]) -> None:
        """Measure both paths anew, for links have changed.

        `ranks`: global ranks that all call it before the same operation; operations that others
        take part in are left alone.
        """
        watched = not self.active and self.timed
        for one in self._all():
            if set(one.members) <= set(ranks):
                one.measure_again(watched)

    def prefetch(self, values: Sequence[tuple[torch.Tensor, dist.ReduceOp]], group: Any) -> None:
        """Send `values` of all-reduces to come over `group` along with its next one.

        A rank that all-reduces one of them then has the result at once, of equal ones in their
        order. Unused results are dropped at the next call. All members have to call it alike.
        """
        found = [(self._find("all_reduce", value, op, group), value) for value, op in values]
        for one in self._all():
            one.prefetched.clear()
        tested = [(one, value) for one, value in found if one is not None and one.all_gather]
        self._to_prefetch[self.members(group)] = tested

    def wait_pending(self) -> None:
        """Wait for what was deferred. Raises PeerLost, and what the deferred callables raise."""
        pending, self.pending = self.pending, []
        for one, _ in pending:
            start = time.monotonic()
            one.wait()
            self._record(one, start, 0.0)
        for _, finish in pending:
            finish()

    def members(self, group: Any) -> tuple[int, ...]:
        """Return the global ranks of a torch process `group` served here; () for any other."""
        group = dist.group.WORLD if group is None else group
        if group not in self._members:
            self._members[group] = self._look_up(group)
        return self._members[group]

    def open_all_gather(self, members: tuple[int, ...], nbytes: int) -> AllGather:
        """Open one more AllGather, of at most `nbytes` each; all global ranks `members` call it."""
        start = time.monotonic()
        all_gather = self._open(members, nbytes)
        self._spans.append(CollectiveSpan("connect", start, time.monotonic(), 0.0, 0.0))
        return all_gather

    # The stand-ins; the arguments are torch's.

    def _all_reduce(
        self, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        native = self._native["all_reduce"]
        known = str(op) in KNOWN and not async_op and isinstance(tensor, torch.Tensor)
        one = self._find("all_reduce", tensor, op, group) if known else None
        if one is None:

            def call() -> Any:
                return native(tensor, op=op, group=group, async_op=async_op)

            work = self._leave(tensor, group, call) if known else call()
            self.wait_pending()
            return work

        def plain(tensor: torch.Tensor) -> None:
            native(tensor, op=op, group=group)

        if not self.active:
            self._watch(one, tensor, plain)
        elif not one.prefetched:
            self._run(one, tensor, plain, self._to_prefetch.pop(self.members(group), ()))
        else:
            now = time.monotonic()
            one.take_prefetched(tensor)
            self._record(one, now, 0.0)
        return None

    def _broadcast(
        self, tensor: Any, src: Any = None, group: Any = None, async_op: bool = False,
        group_src: Any = None,
    ) -> Any:  # fmt: skip
        native = self._native["broadcast"]
        rest = {} if group_src is None else {"group_src": group_src}
        one = None
        if not async_op and src is not None and isinstance(tensor, torch.Tensor):
            one = self._find("broadcast", tensor, src, group)
        if one is None:
            return native(tensor, src, group=group, async_op=async_op, **rest)
        run = self._run if self.active else self._watch
        return run(one, tensor, lambda t: native(t, src, group=group))

    def _barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        native = self._native["barrier"]
        nothing = torch.empty(0, dtype=torch.uint8)
        ours = self.active and not async_op
        one = self._find("barrier", nothing, None, group) if ours else None
        if one is None:
            return native(group=group, async_op=async_op, device_ids=device_ids)
        if not self.barriers:
            self._record(one, time.monotonic(), 0.0)
            return None
        return self._run(one, nothing, lambda _: native(group=group))

    def _run(
        self, one: SmallCollective, tensor: torch.Tensor, native: Native, prefetch: Prefetch = ()
    ) -> None:
        if one.in_flight:  # it was deferred, and nothing has come since that ends it
            self.wait_pending()
        start = time.monotonic()
        started = one.start(tensor, native, prefetch)
        answers = (hook(one, tensor) for hook in self.defer_hooks) if started else ()
        if (finish := next((f for f in answers if f is not None), None)) is not None:
            one.hidden = True
            self.pending.append((one, finish))
            return
        if started:
            one.wait()
        one.hidden |= self.hiding
        self._record(one, start, 0.0 if one.hidden else one.last_seconds[1])
        self.wait_pending()

    def _watch(self, one: SmallCollective, tensor: torch.Tensor, native: Native) -> None:
        """Leave it to the backend for now, and time it there."""
        start = time.monotonic()
        taken = one.watch(tensor, native)
        one.hidden |= self.hiding
        direct = 0.0 if one.hidden else one.last_seconds[1]
        span = CollectiveSpan(one.title, start, start, -1.0, direct, one.stages, one.kept, taken)
        self._spans.append(span)

    def _leave(self, tensor: torch.Tensor, group: Any, call: Callable[[], Any]) -> Any:
        """Leave an all-reduce to the backend for good; time it there where `timed` is set."""
        watched = self.in_step and self.timed and self._by_training
        between = watched and self.members(group)
        if not between:
            return call()
        start, returned = time.monotonic(), []
        taken = timed(self._clock, lambda: returned.append(call()))
        stages = tuple(sorted({self._stage_of[rank] for rank in between}))
        title = f"all_reduce of {tensor.numel()} {tensor.dtype} between {len(between)} ranks"
        self._spans.append(CollectiveSpan(title, start, start, -1.0, -1.0, stages, True, taken))
        return returned[0]

    def _record(self, one: SmallCollective, start: float, direct: float) -> None:
        self._spans.append(
            CollectiveSpan(
                one.title, start, time.monotonic(), one.last_seconds[0], direct, one.stages,
                one.kept,
            )
        )  # fmt: skip

    def _all(self) -> Collection[SmallCollective]:
        return self._collectives.values()

    @property
    def _by_training(self) -> bool:
        """True on the main thread of the rank itself: not in a checkpoint's thread, or a fork."""
        main = threading.current_thread() is threading.main_thread()
        return main and os.getpid() == self._process

    def _find(
        self, name: str, tensor: torch.Tensor, detail: Any, group: Any
    ) -> SmallCollective | None:
        """Return the collective that serves a call across stages that is small enough, or None."""
        served = self.in_step and (self.active or self.timed)
        if not (served and self._by_training):
            return None
        members = self.members(group)
        nbytes = tensor.numel() * tensor.element_size()
        pair = len(members) == 2 and not self._clock.behind
        if not members or nbytes > (PAIR if pair else SMALL):
            return None
        key = (name, str(detail), members, tensor.dtype, tensor.numel())
        if key not in self._collectives:
            op = detail if name == "all_reduce" else None
            source = members.index(detail) if name == "broadcast" else 0
            stages = tuple(sorted({self._stage_of[rank] for rank in members}))

            def connect() -> AllGather:
                return self._open(members, nbytes + COSTS.size + PREFETCH_BYTES)

            self._collectives[key] = SmallCollective(
                name,
                len(self._collectives),
                members,
                stages,
                op,
                source,
                connect,
                self._mode,
                self._say,
                self._clock,
            )
        return self._collectives[key]

    def _look_up(self, group: Any) -> tuple[int, ...]:
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return ()
        members = tuple(dist.get_process_group_ranks(group))
        stages = {self._stage_of[rank] for rank in members}
        # A backend on a device without a clock cannot be timed.
        timed = self._mode != "auto" or self._clock.behind or dist.get_backend(group) == "gloo"
        together = self._within is None or self._within.issuperset(members)
        few = 1 < len(stages) <= MOST_STAGES and len(members) <= MOST_MEMBERS
        taken = descriptors_of([self._stage_of[rank] for rank in members])
        return members if few and timed and together and taken <= self._most else ()

    def _open(self, members: tuple[int, ...], nbytes: int) -> AllGather:
        """Open an AllGather; its `members` alone call it, together."""
        if members not in self._links:
            key = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
            stages = [self._stage_of[rank] for rank in members]
            names = [f"stage {s} (rank {rank})" for s, rank in zip(stages, members, strict=True)]
            me = members.index(dist.get_rank())

            def connect(name: str, some: Sequence[int]) -> Any:
                ranks = [members[number] for number in some]
                group = f"{self._job}/small_collectives/{key}/{name}"
                return self._wire.group(group, ranks, self._timeout)

            self._links[members] = Links(connect, me, stages, names, self._timeout)
        return self._links[members].open(nbytes)
