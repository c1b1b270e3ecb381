"""What an optimizer step returns, known on every stage without asking the others.

After the step Megatron all-reduces, one after the other over the model-parallel group: whether it
was successful, the gradient norm, and, if that is logged, the number of zeros. They follow from
what the stages have told each other during the step, so they are the same on all ranks. At first
all are exchanged together. Once they have been seen to agree, every rank takes its own, tells the
others, and makes sure a step later that theirs were the same.
"""

from __future__ import annotations

import functools
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_adaptra.adapter.compat.patch_attr import put
from megatron_adaptra.errors import AdaptraError
from megatron_adaptra.runtime.collectives.all_gather import AllGather
from megatron_adaptra.runtime.collectives.small_collectives import SmallCollectives
from megatron_adaptra.telemetry.probe import CollectiveSpan

_NONE = -1.0  # Megatron's word for a rank without such a value
_WORD = struct.Struct("<Bdd")  # success, gradient norm, zeros
_SURE = 4  # steps after which agreement is looked for
_TRAINING = "megatron.training.training"
_AGREED = (
    "logical_and_across_model_parallel_group",
    "reduce_max_stat_across_model_parallel_group",
)


class StepResultSync:
    """Stands in for `optimizer.step` of one rank and for what agrees on its results."""

    def __init__(self, optimizer: Any, session: Any) -> None:
        from megatron.training import get_args

        self._session, self._zeros = session, bool(get_args().log_num_zeros_in_grad)
        self.known = False  # what the last step returned is the same everywhere
        self._trusted = False  # for good: all have agreed before
        self._steps = 0
        self._all_gather: AllGather | None = None
        self._skipped: dict[str, list[CollectiveSpan]] = {}  # what agreeing has taken, by function
        self._undo: list[Callable[[], None]] = []
        self._step = optimizer.step
        stepped = functools.wraps(self._step)(lambda *a, **k: self.step(*a, **k))
        self._undo.append(put(optimizer, "step", stepped))
        training = sys.modules[_TRAINING]
        for name in _AGREED:
            self._undo.append(put(training, name, self._agreed(name, getattr(training, name))))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.known = False
        result = self._step(*args, **kwargs)
        collectives = self._session.small_collectives
        if collectives is None or not collectives.active:
            return result
        if collectives.has_pending:
            raise AdaptraError(
                "this optimizer has stepped without a word of the other stages, though gradients "
                "were on their way: use --adaptra-small-collectives off"
            )
        if isinstance(result, tuple) and len(result) == 3:
            self._believe(collectives, result)
            if not self.known:
                self._prefetch(collectives, result)
        return result

    def _prefetch(self, collectives: SmallCollectives, result: Any) -> None:
        """They are sent along with the first one."""
        values = [_number(value) for value in result[1 : 2 + self._zeros]]
        tensors = [torch.tensor([value], dtype=torch.float32) for value in values]
        group = mpu.get_model_parallel_group()
        collectives.prefetch([(tensor, dist.ReduceOp.MAX) for tensor in tensors], group)

    def _believe(self, collectives: SmallCollectives, result: Any) -> None:
        """Whether ours is everybody's, from what all have told after the step before."""
        self._steps += 1
        success, norm, zeros = result
        word = _WORD.pack(bool(success), _number(norm), _number(zeros))
        if self._all_gather is not None:
            words = [bytes(w.tolist()) for w in self._all_gather.wait()]
            same = all(w == words[0] for w in words)
            if self._trusted and not same:
                said = [_WORD.unpack(w) for w in words]
                raise AdaptraError(
                    f"the ranks of a model have had other results of one step: {said}; "
                    "use --adaptra-small-collectives off"
                )
            # A rank without a norm has nothing to train, or its step was skipped.
            self._trusted = self._trusted or (same and _WORD.unpack(words[0])[1] != _NONE)
            self.known = self._trusted
        elif self._steps == _SURE:
            members = collectives.members(mpu.get_model_parallel_group())
            if members:
                self._all_gather = collectives.open_all_gather(members, _WORD.size)
        if self._all_gather is not None:
            self._all_gather.start(torch.frombuffer(bytearray(word), dtype=torch.uint8))

    def _agreed(self, name: str, native: Any) -> Any:
        @functools.wraps(native)
        def agreed(value: Any, *args: Any, **kwargs: Any) -> Any:
            collectives = self._session.small_collectives
            if collectives is None:
                return native(value, *args, **kwargs)
            if not self.known:
                return self._ask(collectives, name, lambda: native(value, *args, **kwargs))
            collectives.record_skipped(self._skipped.get(name, ()))
            if value is None or isinstance(value, bool):
                return value
            return torch.as_tensor(value, dtype=torch.float32).item()  # with Megatron's rounding

        return agreed

    def _ask(self, collectives: SmallCollectives, name: str, native: Callable[[], Any]) -> Any:
        """Once the values are known, this will not take time of its own."""
        began = time.monotonic()
        collectives.hiding = True
        try:
            return native()
        finally:
            collectives.hiding = False
            self._skipped[name] = collectives.spans_since(began)


def _number(value: Any) -> float:
    return _NONE if value is None else float(value)
