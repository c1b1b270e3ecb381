"""One early iteration in which Megatron's messages also go our way, and no op depends on them.

On GPUs a healthy pipeline is Megatron's own. Our messages, through pinned memory and the engine,
are needed when a link gets slow, perhaps hours later, and an error in them ends a training. So they
are rehearsed where stock goes on whatever comes of it: in one iteration each call of Megatron's
communicator is Megatron's, and is then made once more, in shadow, to ours. That checks the order of
the calls, and sends the same messages. The host waits for none of them before the iteration is
over; then all ranks compare bytes and agree. Where one of them has failed, all stay with stock.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_adaptra.adapter.compat.patches import PATCHES, patch
from megatron_adaptra.adapter.compat.schedule_args import (
    ScheduleArgs,
    config_of,
    message_of,
    models_of,
)
from megatron_adaptra.adapter.pipeline.job_gather import reason_anywhere
from megatron_adaptra.adapter.pipeline.native import AdaptraCommunicator
from megatron_adaptra.adapter.pipeline.native_chunks import ChunkCommunicator
from megatron_adaptra.adapter.pipeline.pinned_vote import messages_at_once
from megatron_adaptra.adapter.pipeline.run import Run
from megatron_adaptra.adapter.pipeline.wiring import RankContext
from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import DeviceFailed, PeerLost, ScheduleError, line_of
from megatron_adaptra.config import SPLITTING
from megatron_adaptra.device.base import HOST
from megatron_adaptra.execute.guarded_probe import GuardedProbe
from megatron_adaptra.execute.mailbox import Mailbox
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import first_posts
from megatron_adaptra.transport.base import Transport, Work

_BEFORE = 2  # iterations: caches are filled, and the optimizer has its state
_MOST = 64 << 20  # bytes of messages that go over one link, one way
_LEAST = 2  # microbatches whose messages do, whatever they take
_BOTH_WAYS = "send_forward_backward_recv_forward_backward"  # returns two messages
_CALLS = [target.rpartition(".")[2] for target in PATCHES["rehearsal"].targets]
_DOCTOR = "`adaptra doctor` on both hosts looks for the reason"


class Rehearsal:
    """A rehearsal tries this rank's own messages once in a job, beside Megatron's.

    `context`: of this rank. `wanted`: there may be something to rehearse. `at`: the earliest
    iteration for it, -1 until the job's first one is known, and where there is nothing to rehearse.
    Iterations that Megatron skips put it off.
    """

    def __init__(self, context: RankContext, wanted: bool = True) -> None:
        self._context = context
        self._wanted = wanted and context.config.policy in ("adaptive", *SPLITTING)
        self.at = -1
        self._begun = self._settled = False
        self._reason = ""  # why it has failed here
        self._waited = False  # it is that a message of another rank was not there
        self._shadow: _Shadow | None = None

    def stock_until(self, first: int) -> int:
        """Return the iteration before which no rank leaves stock; the run begins with `first`."""
        if not self._wanted:
            return 0
        if self.at < 0:
            self.at = first + _BEFORE
        return self.at + 2  # the one after it begins before the ranks have agreed

    @contextlib.contextmanager
    def around(self, run: Run, arguments: ScheduleArgs, iteration: int) -> Iterator[None]:
        """Rehearse in an `iteration` of Megatron's schedule with its `arguments`, if that is due.

        Raises nothing of its own.
        """
        if self.at < 0 or iteration < self.at or self._begun:
            yield
            return
        self._begun = True
        if not run.stock:  # these messages are used by now
            yield
            return
        self._context.probe.spoilt("its messages were sent a second time, to rehearse ours")
        with contextlib.ExitStack() as stack:
            try:
                self._shadow = shadow = _Shadow(self._context, run, arguments, iteration, self._try)
                stack.enter_context(patch("rehearsal", **self._calls(shadow)))
            except Exception as error:
                self._fail(error)
            yield
        if self._shadow is not None:
            self._try(self._shadow.ended)

    def settle(self, run: Run) -> str:
        """Return why all ranks stay stock, or ""; call it before the iteration after a rehearsal.

        A collective of all ranks, once. Waits for messages that are still under way, for
        `waits.REHEARSAL` seconds.
        """
        if self._settled or not self._begun:
            return ""
        self._settled = True
        shadow, self._shadow = self._shadow, None
        host = run.wiring.plan_group.names[dist.get_rank()]
        why = self._anywhere(host)  # a failed rank has sent no more: its messages are not awaited
        if shadow is not None and not why:
            self._try(shadow.compare)
            why = self._anywhere(host)
        return why and f"no message leaves the GPU's queue, as a rehearsal of it has failed: {why}"

    def _anywhere(self, host: str) -> str:
        """Return why the rehearsal has failed on some rank, or ""; this one is on `host`."""
        where = f"stage {self._context.stage} on host {host}: "
        try:
            return reason_anywhere(self._reason and where + self._reason, self._waited)
        except PeerLost as error:  # no rank learns that all has gone well
            return line_of(error)

    def _calls(self, shadow: _Shadow) -> dict[str, Callable[..., Any]]:
        """Return Megatron's methods by name, each followed by the same call in `shadow`."""

        def both(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(communicator: Any, *args: Any, **kwargs: Any) -> Any:
                theirs = original(communicator, *args, **kwargs)
                self._try(shadow.call, name, args, kwargs, theirs)
                return theirs

            return call

        return {name: both(name, getattr(P2PCommunicator, name)) for name in _CALLS}

    def _try(self, function: Callable[..., None], *args: Any) -> None:
        if self._reason:
            return
        try:
            function(*args)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        advice = ""
        if isinstance(error, ScheduleError):
            advice = "; adapting takes the order of calls of an unmodified Megatron"
        self._reason, self._waited = f"{line_of(error)}{advice}", isinstance(error, PeerLost)


@dataclass
class _Message:
    """A _Message pairs what was received for `op`: by us into `ours`, by Megatron as `theirs`."""

    op: Op
    peer: int
    work: Work
    ours: torch.Tensor
    theirs: torch.Tensor | None = None


class _Shadow:
    """A shadow repeats Megatron's calls in one iteration on our communicator.

    `attempt`: calls a function of ours while Megatron runs, and keeps errors of it from Megatron.
    Raises DeviceFailed where there is no memory for it.
    """

    def __init__(
        self,
        context: RankContext,
        run: Run,
        arguments: ScheduleArgs,
        iteration: int,
        attempt: Callable[..., None],
    ) -> None:
        self._attempt = attempt
        new_message, wiring, staging = message_of(arguments), run.wiring, run.wiring.staging
        nbytes = new_message().nbytes
        count = max(_LEAST, _MOST // max(1, nbytes))
        self._mailbox = _ShadowMailbox(wiring.mailbox, wiring.pipelines, count)
        if staging is not None:
            at_once = messages_at_once(run.program, context.worker)
            if why := context.guard.result(
                waits.START, staging.reserve, nbytes, at_once, iteration + 1
            ):
                raise DeviceFailed(f"it cannot pin memory for its GPU's messages: {why}")
        posts = [op for op in run.line if op.kind in (Kind.POST_F, Kind.POST_B)]
        received = sum(op.microbatch < count for op in posts)
        _check_room(2 * nbytes * received)  # ours and theirs
        self._mailbox.begin(iteration, new_message)
        config = copy.copy(config_of(arguments))
        config.timers = None  # they have timed Megatron's own call
        group = mpu.get_pipeline_model_parallel_group()
        profile, line, chunks = context.profile, run.line, len(models_of(arguments))
        self._native: AdaptraCommunicator | ChunkCommunicator
        if chunks == 1:
            self._native = AdaptraCommunicator(group, config, profile, line, self._mailbox)
        else:
            self._native = ChunkCommunicator(group, config, chunks, line, self._mailbox)
        self._name = context.watchdog.name
        for op in first_posts(run.program, context.worker):
            self._mailbox.post(op)

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], theirs: Any) -> None:
        """Repeat the call of `name`, for which Megatron has got `theirs`; wait for nothing.

        Raises ScheduleError where the plan of this iteration has another call.
        """
        before = len(self._mailbox.received)
        ours = getattr(self._native, name)(*args, **kwargs)
        found = theirs if isinstance(theirs, (list, tuple)) else [theirs]
        two = {Kind.B: found[-1]} if name == _BOTH_WAYS else {}
        self._keep(before, found[0], two)
        if not isinstance(ours, tuple):
            return
        for key, wait in ours[1].items():  # what Megatron has is not there yet
            if key not in (found[1] or ()):
                raise ScheduleError(f"Megatron does not wait for {key}, the plan does")
            then = partial(self._attempt, self._take, wait, found[0])
            found[1][key] = _Both(found[1][key], then)

    def _take(self, wait: Any, theirs: Any) -> None:
        before = len(self._mailbox.received)
        wait.wait()
        self._keep(before, theirs, {})

    def _keep(self, before: int, theirs: Any, others: Mapping[Kind, Any]) -> None:
        """Keep what Megatron has got for our messages from number `before` on, to compare them.

        `others`: by kind of op, where that is not `theirs`.
        """
        for message in self._mailbox.received[before:]:
            tensor = others.get(message.op.kind, theirs)
            if tensor is None:
                raise ScheduleError(f"Megatron has no message for {message.op}, the plan has one")
            # Megatron may write results over it.
            message.theirs = tensor.detach().clone()

    def ended(self) -> None:
        """Raise ScheduleError unless the plan is over when Megatron's schedule is."""
        self._native.finish()

    def compare(self) -> None:
        """Wait for all messages, and compare bytes.

        Raises PeerLost for one that does not come, or does not leave, in time; DeviceFailed for one
        with other bytes.
        """
        # First, for that waits for the GPU: before it is there a message may not have been made.
        copies = [_bytes(message.theirs) for message in self._mailbox.received]
        deadline = time.monotonic() + waits.REHEARSAL
        for message, theirs in zip(self._mailbox.received, copies, strict=True):
            self._await(message.work, deadline, f"{message.op} from", message.peer)
            ours = _bytes(message.ours)
            if not torch.equal(ours, theirs):
                differ = int((ours != theirs).sum()) if len(ours) == len(theirs) else len(theirs)
                raise DeviceFailed(
                    f"the message for {message.op} from {self._name(message.peer)} came with "
                    f"{differ} of {len(theirs)} bytes other than in Megatron's own; {_DOCTOR}"
                )
        for op, peer, work in self._mailbox.sent:
            self._await(work, deadline, f"{op} to", peer)

    def _await(self, work: Work, deadline: float, what: str, peer: int) -> None:
        try:
            work.wait(max(0.01, deadline - time.monotonic()))
        except PeerLost as error:
            raise PeerLost(
                f"the message {what} {self._name(peer)} is not there {waits.REHEARSAL:g} s after "
                f"the iteration ({line_of(error)}); {_DOCTOR}"
            ) from error


@dataclass(frozen=True)
class _Both:
    """A _Both waits for Megatron's handle of a message, `theirs`, and then calls `then`."""

    theirs: Any
    then: Callable[[], None]

    def wait(self) -> Any:
        done = self.theirs.wait()
        self.then()
        return done

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of Megatron's handle, which a fork of Megatron may read."""
        return getattr(self.theirs, name)


def _bytes(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.cpu().reshape(-1).view(torch.uint8)


class _ShadowMailbox(Mailbox):
    """A shadow mailbox waits for nothing, and reports no ops.

    `like`: this worker's own mailbox, whose `transports` it uses. `count`: messages of so many
    microbatches are sent, to bound the memory that they take.
    """

    def __init__(self, like: Mailbox, transports: Sequence[Transport], count: int) -> None:
        silent = Guard()
        silent.off = True
        probe = GuardedProbe(silent, like.neighbours.stage, HOST)
        super().__init__(
            like.neighbours, transports[0], probe, like.watchdog, like.timeout, transports[-1]
        )
        self._count = count
        self.received: list[_Message] = []

    @property
    def sent(self) -> list[tuple[Op, int, Work]]:
        """The messages sent: of each its op, the peer's worker number, and its work."""
        return self._sent

    def post(self, op: Op) -> None:
        if op.microbatch < self._count:
            super().post(op)

    def buffer(self, op: Op) -> torch.Tensor:
        return super().buffer(op) if op.microbatch < self._count else torch.empty(0)

    def take(self, op: Op) -> torch.Tensor:
        """Return memory whose contents are not there yet: see `received`."""
        if op.microbatch >= self._count:
            return torch.empty(0)
        exchange = self._awaited(op)
        work, buffer = self._posted.pop(exchange)
        self.received.append(_Message(op, exchange.peer, work, buffer))
        return buffer

    def send(self, op: Op, tensor: torch.Tensor) -> None:
        if op.microbatch < self._count:
            super().send(op, tensor)


def _check_room(nbytes: int) -> None:
    """Raise DeviceFailed unless the GPU has `nbytes` beside the most that training has taken."""
    reserve = torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
    left = int(torch.cuda.mem_get_info()[0] + reserve)
    if left < nbytes:
        raise DeviceFailed(
            f"its GPU has {left >> 20} MiB beside the training, and messages take "
            f"{-(-nbytes >> 20)} MiB; a smaller --micro-batch-size leaves more"
        )
