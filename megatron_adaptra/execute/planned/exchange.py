"""Runs collective plans over a transport: any goal, by any builder, asynchronous.

The same bits come from run to run and on all ranks, whichever of them is late, as a plan fixes the
order of each addition. When a collective starts, all messages that need no other rank's part are
sent, and all receives are posted; a thread of its own runs the rest of its line. All ranks start
the same ones in the same order, so that none depends on one that was started later.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch.distributed import ReduceOp

from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import BadInput, Disagreement, PeerLost
from megatron_adaptra.base.exits import before_exit, wait_at_exit
from megatron_adaptra.execute.planned.layout import Layout, Step
from megatron_adaptra.execute.planned.reports import Reports
from megatron_adaptra.ir.collective import Action, CollectivePlan, Goal
from megatron_adaptra.transport.base import Transport, Work

_HALF = (torch.float16, torch.bfloat16)  # added in float32
FLOATS = (torch.float32, torch.float64, *_HALF)
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_OPS = {ReduceOp.SUM: "sum", ReduceOp.AVG: "average"}
_TAGS = 1 << 31
# Bytes up to which copies of a tensor are sent, so that a rank goes on once it has what it needs,
# and need not wait until others have confirmed what it has sent.
COPIED = 64 << 20


class Exchange:
    """An exchange runs one rank's side of collectives, which all ranks start in the same order.

    Args:
        transport: between all ranks, for the data. Numbers of ranks are the plan's.
        control: between all ranks, for what they report to each other.
        me: this rank.
        names: of the ranks, for errors.
        timeout: seconds that a message of another rank is waited for.
    """

    def __init__(
        self,
        transport: Transport,
        control: Transport,
        me: int,
        names: Sequence[str],
        timeout: float,
    ) -> None:
        self.transport, self.me, self.names = transport, me, tuple(names)
        self.timeout = timeout
        # Seconds until a rank asks who waits for whom, and between its looks whether others ask.
        self.asks_after = timeout - min(waits.CHAIN, timeout / 2)
        self.looks_every = min(waits.POLL, timeout / 16)
        self.reports = Reports(control, me, len(names))
        # Called while a message is waited for: raises what ends the wait.
        self.check: Callable[[], None] = lambda: None
        self._layouts: dict[tuple[str, int, torch.dtype, str], Layout] = {}
        self._started = self._next_tag = 0
        self._leaving: list[ExchangeWork] = []  # whose messages may not all have left
        # A rank that has its own results and ends may have sent what others still need.
        before_exit(self, lambda exchange: exchange.let_leave(min(exchange.timeout, waits.END)))

    def start(
        self, tensor: torch.Tensor, plan: CollectivePlan, op: ReduceOp.RedOpType = ReduceOp.SUM
    ) -> ExchangeWork:
        """Begin to run `plan` on `tensor`, which gets the result.

        In a reduce-scatter or an all-gather, shard r is the r-th of as many equal parts of the
        tensor as there are ranks, and stays where it is; what a reduce-scatter leaves in the other
        shards is of no use.
        The first start with a plan and a size waits for all ranks, to compare them; later ones
        return at once.

        Args:
            tensor: contiguous, on the CPU, of any shape; floats, or integers, which are exact as
                long as they do not overflow. Must not be touched until the work has ended.
            plan: the same on all ranks.
            op: SUM or AVG, which is the sum divided once, before it is rounded; floats only. An
                all-gather takes SUM, and adds nothing.

        Raises:
            BadInput: a tensor, a plan or an operation that it does not take.
            Disagreement: ranks have different plans, sizes, dtypes or operations.
            PeerLost: a rank does not come to compare plans, or was lost before.
        """
        self._check(tensor, plan, op)
        layout = self._agreed(plan, tensor, _OPS[op])
        if self._next_tag + plan.tags > _TAGS:
            self._next_tag = 0
        first_tag, self._next_tag = self._next_tag, self._next_tag + plan.tags
        number, self._started = self._started, self._started + 1
        divisor = plan.ranks if op == ReduceOp.AVG else 1
        flat = tensor.detach().view(-1)
        work = ExchangeWork(self, number, flat, layout, first_tag, divisor)
        self._leaving = [*(one for one in self._leaving if not one.left.is_set()), work]
        return work

    def close(self) -> None:
        """Close the transports once ended collectives' messages have left; abort the others."""
        self.let_leave(self.timeout)
        self.reports.close()
        self.transport.close()

    def let_leave(self, seconds: float) -> None:
        """Wait `seconds` at most until the messages of ended collectives have left."""
        end = time.monotonic() + seconds
        for work in self._leaving:
            if work.done():
                work.left.wait(max(0.0, end - time.monotonic()))

    def error_of_loss(self) -> PeerLost | None:
        """Return the error that all ranks raise once one is lost; None while none is."""
        self.reports.read()
        if (loss := self.reports.loss) is None:
            return None
        text = f"waited for {self.names[loss.rank]} in a collective: {loss.reason}"
        if loss.by != self.me:
            text += f" (found by {self.names[loss.by]})"
        return PeerLost(text)

    def give_up(self, number: int, rank: int, reason: str) -> PeerLost:
        """Report that `rank` is lost, for a `reason`, in exchange `number`; return the error.

        All others have been sent the report by then. The first loss that is known counts.
        """
        self.reports.lost(number, rank, reason)
        error = self.error_of_loss()
        assert error is not None
        return error

    def _check(self, tensor: torch.Tensor, plan: CollectivePlan, op: ReduceOp.RedOpType) -> None:
        if plan.ranks != len(self.names):
            raise BadInput("collective plan's ranks", plan.ranks, f"there are {len(self.names)}")
        if op not in _OPS:
            raise BadInput("operation of a collective", str(op), "SUM or AVG")
        if op == ReduceOp.AVG and plan.goal is Goal.ALL_GATHER:
            raise BadInput("operation of an all-gather", str(op), "SUM, as it adds nothing")
        if plan.owners and tensor.numel() % plan.ranks:
            allowed = f"equal shards need a multiple of {plan.ranks}"
            raise BadInput("elements of a buffer in shards", tensor.numel(), allowed)
        if op == ReduceOp.AVG and tensor.dtype not in FLOATS:
            raise BadInput("dtype of an average", str(tensor.dtype), "floats only")
        if tensor.dtype not in (*FLOATS, *_WHOLE):
            raise BadInput("dtype of a collective", str(tensor.dtype), "floats and integers")
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            what = f"{tensor.layout} on {tensor.device}"
            raise BadInput("tensor of a collective", what, "dense, on the CPU")
        if not tensor.is_contiguous():
            raise BadInput("tensor of a collective", tuple(tensor.stride()), "contiguous memory")

    def _agreed(self, plan: CollectivePlan, tensor: torch.Tensor, op: str) -> Layout:
        """Return the layout; a new one only once all ranks are known to have the same plan."""
        if error := self.error_of_loss():
            raise error
        key = plan.digest(), tensor.numel(), tensor.dtype, op
        if key not in self._layouts:
            what = op if plan.goal is Goal.ALL_REDUCE else f"{plan.goal.value} ({op})"
            mine = f"{what} of {key[1]} {key[2]} by {plan.name or 'a plan'} {key[0][:12]}"
            self._compare(len(self._layouts), mine)
            self._layouts[key] = Layout(plan, self.me, tensor.numel())
        return self._layouts[key]

    def _compare(self, number: int, mine: str) -> None:
        """Raise Disagreement unless all ranks have the same text. Collective."""
        reports, end = self.reports, time.monotonic() + self.timeout
        reports.plan(number, mine)
        ranks = range(len(self.names))
        while True:
            if error := self.error_of_loss():  # which reads all that has come
                raise error
            missing = [rank for rank in ranks if (number, rank) not in reports.plans]
            if not missing:
                break
            closed = [rank for rank in missing if rank in reports.closed]
            if closed or time.monotonic() >= end:
                late = f"no word of its plan in {self.timeout:g} s"
                reason = "its connection closed" if closed else late
                raise self.give_up(-1, (closed or missing)[0], reason)
            reports.await_one(missing[0], self.looks_every, number)
        having: dict[str, list[str]] = {}
        for rank in ranks:
            having.setdefault(reports.plans.pop((number, rank)), []).append(self.names[rank])
        if len(having) > 1:
            each = "; ".join(f"{text}: {', '.join(names)}" for text, names in having.items())
            raise Disagreement(f"ranks start different collectives: {each}")


class ExchangeWork:
    """A collective under way; Exchange starts it.

    `number`: of the exchange. `flat`: the buffer. `first_tag`: added to the plan's tags.
    `divisor`: of the sum. `left` is set once its messages have left, or copies of them.
    """

    def __init__(
        self,
        exchange: Exchange,
        number: int,
        flat: torch.Tensor,
        layout: Layout,
        first_tag: int,
        divisor: int,
    ) -> None:
        self.left = threading.Event()
        self._copies = flat.nbytes <= COPIED
        self._exchange, self._number, self._flat = exchange, number, flat
        self._layout, self._first_tag, self._divisor = layout, first_tag, divisor
        self._staging = torch.empty(layout.staged, dtype=flat.dtype)
        self._sends: list[tuple[int, Work]] = []
        self._receives: list[Work] = []
        self._result: Future[None] = Future()
        # Before hundreds of receives are posted: meanwhile the port would do nothing.
        for step in layout.steps[: layout.ready]:
            self._step(step)
        try:
            for source, tag, begin, elements, staged in layout.receives:
                memory = (self._staging if staged else flat)[begin : begin + elements]
                work = exchange.transport.irecv(memory, source, first_tag + tag)
                self._receives.append(work)
        except PeerLost as error:
            self._abort()
            raise exchange.give_up(number, source, str(error)) from error
        # A daemon: one that still waits must not keep a process that has failed from ending.
        thread = threading.Thread(target=self._run, name="adaptra-exchange", daemon=True)
        wait_at_exit(thread)
        thread.start()

    def done(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self._result.done()

    def when_done(self, call: Callable[[BaseException | None], object]) -> None:
        """Have `call` called once, with the error that `wait` would raise, or None.

        On the thread of the collective, or on this one where it has ended.
        """
        self._result.add_done_callback(lambda result: call(result.exception()))

    def wait(self) -> None:
        """Block until the tensor holds the result, which the exchange's timeout limits.

        Raises PeerLost: a rank was lost, the same on all ranks.
        """
        self._result.result()

    def _run(self) -> None:
        try:
            for step in self._layout.steps[self._layout.ready :]:
                self._step(step)
            if not self._copies:
                self._await_all_sent()
        except BaseException as error:
            self._abort()
            self._result.set_exception(error)
        else:
            self._result.set_result(None)
            if self._copies:
                with contextlib.suppress(PeerLost):  # which the next one raises on all ranks
                    self._await_all_sent()
        self.left.set()

    def _await_all_sent(self) -> None:
        for target, send in self._sends:
            self._await_sent(send, target)

    def _step(self, step: Step) -> None:
        mine = self._flat[step.begin : step.end]
        if step.action.sends:
            mine = mine.clone() if self._copies else mine
            for target in step.ranks:
                try:
                    send = self._exchange.transport.isend(mine, target, self._first_tag + step.tag)
                except PeerLost as error:
                    raise self._closed(target, str(error)) from error
                self._sends.append((target, send))
        elif step.action is Action.ADD:
            self._add(step, mine)
        else:
            (source,) = step.ranks
            got = self._received(step, source)
            if got.data_ptr() != mine.data_ptr():
                mine.copy_(got)

    def _add(self, step: Step, mine: torch.Tensor) -> None:
        """Add the ranks' parts from left to right; round once, to the buffer's dtype."""
        total: torch.Tensor | None = None
        half = mine.dtype in _HALF
        for rank in step.ranks:
            term = mine if rank == self._exchange.me else self._received(step, rank)
            if total is None:
                total = term.float() if half else term
            else:
                total = torch.add(total, term, out=mine if term is mine and not half else total)
        assert total is not None
        if self._divisor > 1:
            for elements in step.finished:
                total[elements] /= self._divisor
        if total is not mine:
            mine.copy_(total)

    def _received(self, step: Step, source: int) -> torch.Tensor:
        number = step.receives[source]
        self._await(self._receives[number], source)
        _, _, begin, elements, staged = self._layout.receives[number]
        return (self._staging if staged else self._flat)[begin : begin + elements]

    def _await(self, work: Work, source: int) -> None:
        """Wait for a message. Raises PeerLost, of the rank that all others name as well."""
        exchange, reports = self._exchange, self._exchange.reports
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            try:
                work.wait(min(exchange.looks_every, max(0.0, exchange.timeout - waited)))
                break
            except PeerLost:
                over = work.done()
            if over:
                try:
                    work.wait(0.0)
                    break  # it came at the last moment
                except PeerLost as error:
                    raise self._closed(source, str(error)) from error
            if known := exchange.error_of_loss():
                raise known
            exchange.check()
            waited = time.monotonic() - began
            if waited >= exchange.asks_after or self._number in reports.asked:
                reports.waiting(self._number, source)
            if waited >= exchange.timeout:
                rank = reports.culprit(self._number, source)
                raise exchange.give_up(self._number, rank, f"nothing in {exchange.timeout:g} s")

    def _await_sent(self, send: Work, target: int) -> None:
        """Wait until a message has left.

        All others' parts are here by now. A target that has ended meanwhile has ended all its
        collectives, too, or has died, which those find that wait for it.
        """
        exchange, began = self._exchange, time.monotonic()
        try:
            send.wait(exchange.timeout)
        except PeerLost as error:
            if known := exchange.error_of_loss():
                raise known from error
            if time.monotonic() - began >= exchange.timeout:
                reason = f"it took nothing in {exchange.timeout:g} s"
                raise exchange.give_up(self._number, target, reason) from error

    def _closed(self, rank: int, reason: str) -> PeerLost:
        """Return the error for a failed connection: `rank` may have ended over another's loss.

        So wait for a report that `rank` has sent before, or until it can send none any more.
        """
        exchange, reports = self._exchange, self._exchange.reports
        end = time.monotonic() + exchange.timeout - exchange.asks_after
        reports.read()
        while reports.loss is None and rank not in reports.closed and time.monotonic() < end:
            reports.await_one(rank, exchange.looks_every)
        return exchange.give_up(self._number, rank, reason)

    def _abort(self) -> None:
        """Abort all receives: nothing is written to the buffer after this."""
        for work in self._receives:
            if not work.done():
                work.abort()
