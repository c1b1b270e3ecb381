"""Post-validation: the optimizer steps before it is known whether it should have.

A step needs two things of all stages: whether a gradient has overflowed, and the norm of all
gradients, by which they are clipped. Nearly always the answers are no and small enough. So a stage
tells the others what it knows, steps on that alone, and starts the next iteration. The verdict
arrives during its warmup, and stops it at a gate (ir/gate.py) before anything is lost: if it is
bad, the step is undone, done as it should have been, and the iteration begins anew.

The idea is of Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 4; there the values
travel along the pipeline, and the step is inverted, which is not exact.

The last stage waits for the verdict before its step: it has nothing to do until a forward has come
all the way, and it is the one that logs. So does everybody after a bad verdict, until a good one:
where clipping is usual, nothing is undone.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.adapter.optimizer_copy import OptimizerCopy
from megatron_adaptra.adapter.replace import put
from megatron_adaptra.adapter.timers import stopped_on
from megatron_adaptra.runtime.exchange import Exchange
from megatron_adaptra.runtime.tail import Tail
from megatron_adaptra.runtime.watchdog import say
from megatron_adaptra.runtime.way import Way

_WORD = struct.Struct("<B3x4s")  # overflow, the norm's share as it is in memory


class Restart(Exception):
    """The iteration that has begun used parameters that should not be."""


class _Overflow(Exception):
    """Another stage's gradients have overflowed: there is no step."""


class PostValidation:
    """Stands in for `optimizer.step` of one rank. `model`: Megatron's chunks, wrapped by its DDP.

    `pending`: a step has been taken on trust, and the next iteration must not pass its gate before
    `settle`.
    """

    def __init__(
        self, optimizer: Any, scheduler: Any, model: Sequence[Any], tail: Callable[[], Tail | None],
        last_stage: bool,
    ) -> None:  # fmt: skip
        self.pending = False
        self.trusted = self.undone = 0  # steps
        self._optimizer, self._scheduler, self._last = optimizer, scheduler, last_stage
        self._tail, self._clip = tail, float(optimizer.config.clip_grad)
        self._copy = OptimizerCopy(optimizer)
        self._step = optimizer.step
        self._exchange: Exchange | None = None
        self._norm: Way | None = None  # the all-reduce of the gradient norm
        self._seen: list[Way] = []  # what this step has reduced over the stages
        self._trusting = False  # the last verdict was good
        self.combined = False  # the last step's verdict came, or comes, in one exchange
        self._told = self._exact = False
        self._heard: tuple[bool, torch.Tensor] | None = None
        self._increment = 0
        self._zero_later: list[Callable[[], None]] = []
        self._undo: list[Callable[[], None]] = []
        self._install(model)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def settle(self) -> bool:
        """Wait for the verdict on the last step. False if the step has been undone, and done as it
        should have been: what was computed since is void."""
        if not self.pending:
            return True
        overflow, total = self._hear()
        good = not overflow and not self._clips(total)
        if not good:
            self.undone += 1
            if not self._exact:
                self._mend(overflow, total)
                self._optimizer.zero_grad()  # as Megatron had done before the iteration
        self.pending, self._trusting = False, good
        self._copy.let_go()
        for zero in self._zero_later:
            zero()
        self._zero_later = []
        return good

    def step(self) -> Any:
        """What Megatron calls: success, gradient norm, zeros, as far as they are known here."""
        tail = self._tail()
        if tail is None or not tail.active:
            self.combined = False
            return self._step()
        if not self._ready(tail):
            return self._learn(tail)
        trust = self._trusting
        self.combined, self._told, self._exact = True, False, not trust or self._last
        self._copy.take_scales()
        if not self._exact:
            self._copy.take()
        tail.before = self._answer
        try:
            with stopped_on(_Overflow, self._optimizer.config.timers):
                result = self._step()
        except _Overflow:
            self._copy.overflow()  # this stage has found none, and made its loss scale believe so
            result = (False, None, None)
        finally:
            tail.before = None
        if not self._told:  # an overflow of this stage's: there was no norm
            self._tell(True, torch.zeros(1))
            self._exact = True
        if trust:
            self._copy.hold_gradients()
            self.pending = True
            self.trusted += 1
        else:
            overflow, total = self._hear()
            self._trusting = not overflow and not self._clips(total)
        return result

    def _ready(self, tail: Tail) -> bool:
        """Whether the steps so far were of a kind that we know, and their sum's order, too."""
        if self._exchange is not None:
            return True
        sums = [way for way in self._seen if way.op == dist.ReduceOp.SUM]
        rest = [way for way in self._seen if way.op != dist.ReduceOp.SUM]
        known = len(sums) == 1 and len(rest) <= 1 and all(w.op == dist.ReduceOp.MAX for w in rest)
        if not (known and all(way.proven for way in self._seen)):
            return False
        self._norm = sums[0]
        self._exchange = tail.open_exchange(sums[0].members, _WORD.size)
        return True

    def _learn(self, tail: Tail) -> Any:
        self._seen, self.combined = [], False

        def note(way: Way, _: torch.Tensor) -> bool:
            self._seen.append(way)
            way.absorbed = True
            return False

        tail.before = note
        try:
            result = self._step()
        finally:
            tail.before = None
        self._trusting = False
        return result

    def _answer(self, way: Way, tensor: torch.Tensor) -> bool:
        """In place of an all-reduce in Megatron's step."""
        if way.op == dist.ReduceOp.MAX:
            return True  # the overflow: ours is known, the others' comes with the verdict
        if way is not self._norm:
            return False
        self._tell(False, tensor)
        # What is too much already will not get less.
        if self._exact or self._clips(tensor):
            self._exact = True
            overflow, total = self._hear()
            if overflow:
                raise _Overflow
            tensor.copy_(total)
        return True

    def _tell(self, overflow: bool, share: torch.Tensor) -> None:
        assert self._exchange is not None
        word = _WORD.pack(overflow, share.detach().cpu().view(torch.uint8).numpy().tobytes())
        self._exchange.tell(torch.frombuffer(bytearray(word), dtype=torch.uint8))
        self._told, self._heard = True, None

    def _hear(self) -> tuple[bool, torch.Tensor]:
        """Whether a gradient has overflowed anywhere; the sum, of one element, as the backend adds
        it up."""
        assert self._exchange is not None
        assert self._norm is not None
        if self._heard is None:
            words = [_WORD.unpack(bytes(w.tolist())) for w in self._exchange.hear()]
            shares = [torch.frombuffer(bytearray(w), dtype=torch.float32) for _, w in words]
            self._heard = any(o for o, _ in words), self._norm.result(shares)
        return self._heard

    def _clips(self, total: torch.Tensor) -> bool:
        """Megatron's condition (clip_grads.py), with its rounding."""
        return self._clip > 0 and self._clip / (float(total.item()) ** 0.5 + 1.0e-6) < 1.0

    def _mend(self, overflow: bool, total: torch.Tensor) -> None:
        if overflow:
            self._copy.skip()
            self._scheduler.step(increment=-self._increment)
            return
        tail = self._tail()
        assert tail is not None

        def known(way: Way, tensor: torch.Tensor) -> bool:
            if way is self._norm:
                tensor.copy_(total)
            return way is self._norm

        tail.before = known
        try:
            self._copy.step_again(self._step)
        finally:
            tail.before = None

    def _install(self, model: Sequence[Any]) -> None:
        optimizer, scheduler = self._optimizer, self._scheduler
        stepped = functools.wraps(self._step)(lambda *_, **__: self.step())
        self._undo.append(put(optimizer, "step", stepped))
        advance = scheduler.step

        @functools.wraps(advance)
        def advanced(increment: int) -> Any:
            self._increment = increment
            return advance(increment=increment)

        self._undo.append(put(scheduler, "step", advanced))
        for chunk in model:
            for buffer in (*chunk.buffers, *getattr(chunk, "expert_parallel_buffers", ())):
                self._undo.append(put(buffer, "reset", self._later(buffer.reset)))

    def _later(self, reset: Callable[[], None]) -> Callable[[], None]:
        """Gradients stay until nobody can want them any more."""

        @functools.wraps(reset)
        def later() -> None:
            if self.pending:
                self._zero_later.append(reset)
            else:
                reset()

        return later


def attach(session: Any, result: Sequence[Any]) -> Callable[[], None]:
    """After Megatron's `setup_model_and_optimizer`, which has returned `result`. Collective."""
    model, optimizer, scheduler = result[:3]
    reason = _reason_against(model, optimizer)
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    found = next((r for r in reasons if r), "")
    if found:
        if dist.get_rank() == 0:
            say(f"no post-validation: {found}")
        return lambda: None
    last = session.stage == session.stages - 1
    session.post = PostValidation(optimizer, scheduler, model, lambda: session.tail, last)
    post: PostValidation = session.post

    def undo() -> None:
        post.undo()
        if dist.get_rank() == 0:
            say(f"post-validation: {post.trusted} steps before their verdict, {post.undone} undone")

    return undo


def _reason_against(model: Sequence[Any], optimizer: Any) -> str:
    """Why steps of this rank's optimizer cannot be undone, or nothing."""
    if optimizer is None or not getattr(optimizer, "param_groups", None):
        return "a rank has no parameters to train"
    leaves = OptimizerCopy(optimizer).optimizers
    for method in ("prepare_grads", "step_with_ready_grads"):
        if not all(hasattr(o, method) for o in (optimizer, *leaves)):
            return f"{type(optimizer).__name__} has no {method}"
    if len(model) != 1:
        return "the model has several chunks (interleaved schedule)"
    buffers = getattr(model[0], "buffers", None)
    if not isinstance(buffers, list) or not all(hasattr(buffer, "reset") for buffer in buffers):
        return f"{type(model[0]).__name__} has no gradient buffers that are known"
    return ""
