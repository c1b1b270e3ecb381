"""What an optimizer step returns, known on every stage without asking the others.

After the step Megatron all-reduces, one after the other over the model-parallel group: whether it
was successful, the gradient norm, and, if that is logged, the number of zeros. They follow from
what the stages have sent each other during the step, so they are the same on all ranks. At first
all are exchanged together. Once they have been seen to agree, every rank takes its own, sends it to
the others, and makes sure a step later that theirs were the same.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_adaptra.adapter.compat.patches import patch
from megatron_adaptra.errors import AdaptraError
from megatron_adaptra.runtime.collectives.all_gather import AllGather
from megatron_adaptra.runtime.collectives.small_collectives import SmallCollectives
from megatron_adaptra.telemetry.iteration_record import CollectiveSpan

_NONE = -1.0  # Megatron's value for a rank that has none
_RESULT = struct.Struct("<Bdd")  # success, gradient norm, zeros
_FIRST_COMPARED = 4  # the step whose results are the first to be compared between stages
_AGREED = (
    "logical_and_across_model_parallel_group",
    "reduce_max_stat_across_model_parallel_group",
)


class StepResultSync:
    """Stands in for `optimizer.step` of one rank and for what agrees on its results.

    `session`: the rank's Session, whose small collectives come with its first iteration.
    """

    def __init__(self, optimizer: Any, session: Any) -> None:
        from megatron.training import get_args

        self._session, self._zeros = session, bool(get_args().log_num_zeros_in_grad)
        self.known = False  # what the last step returned is the same everywhere
        self._trusted = False  # for good: all have agreed before
        self._steps = 0
        self._all_gather: AllGather | None = None
        self._skipped: dict[str, list[CollectiveSpan]] = {}  # what agreeing has taken, by function
        self._optimizer, self._step = optimizer, optimizer.step

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """While the training loop steps through this object and asks it what all agree on."""
        training = sys.modules["megatron.training.training"]

        @functools.wraps(self._step)
        def step(*args: Any, **kwargs: Any) -> Any:
            return self.step(*args, **kwargs)

        agreed = {name: self._agreed(name, getattr(training, name)) for name in _AGREED}
        with patch("step-result", self._optimizer, step=step), patch("step-agreement", **agreed):
            yield

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step, whose results are then known, or exchanged.

        Raises AdaptraError if the stages disagree, or if gradients are still on their way.
        """
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
            self._compare(collectives, result)
            if not self.known:
                self._prefetch(collectives, result)
        return result

    def _prefetch(self, collectives: SmallCollectives, result: Any) -> None:
        """Send norm and zeros along with the first value that is agreed on."""
        values = [_number(value) for value in result[1 : 2 + self._zeros]]
        tensors = [torch.tensor([value], dtype=torch.float32) for value in values]
        group = mpu.get_model_parallel_group()
        collectives.prefetch([(tensor, dist.ReduceOp.MAX) for tensor in tensors], group)

    def _compare(self, collectives: SmallCollectives, result: Any) -> None:
        """Learn from the step before whether all ranks have the same; send them this step's."""
        self._steps += 1
        success, norm, zeros = result
        mine = _RESULT.pack(bool(success), _number(norm), _number(zeros))
        if self._all_gather is not None:
            packed = [bytes(result.tolist()) for result in self._all_gather.wait()]
            same = len(set(packed)) == 1  # bytes: a norm that is not a number equals itself, too
            before = [_RESULT.unpack(result) for result in packed]
            if self._trusted and not same:
                raise AdaptraError(
                    f"the ranks of a model have had other results of one step: {before}; "
                    "use --adaptra-small-collectives off"
                )
            # A rank without a norm has nothing to train, or its step was skipped.
            self._trusted = self._trusted or (same and before[0][1] != _NONE)
            self.known = self._trusted
        elif self._steps == _FIRST_COMPARED:
            members = collectives.members(mpu.get_model_parallel_group())
            if members:
                self._all_gather = collectives.open_all_gather(members, _RESULT.size)
        if self._all_gather is not None:
            self._all_gather.start(torch.frombuffer(bytearray(mine), dtype=torch.uint8))

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
