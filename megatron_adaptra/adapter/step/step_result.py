"""The result of an optimizer step, known on every stage without asking the others.

After the step Megatron all-reduces, one after the other over the model-parallel group: whether it
was successful, the gradient norm, and, if that is logged, the number of zeros. They follow from
what the stages have sent each other during the step, so they are the same on all ranks. At first
all are exchanged together. Once they have been seen to agree, every rank takes its own, sends it to
the others, and makes sure before the next step that theirs were the same. If they were not, all the
ranks of a model see that in the same step: they ask each other again from then on, and take back
what they have added to the schedule of learning rates, if that step was not successful everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_adaptra.adapter.compat.patches import PATCHES, patch
from megatron_adaptra.base.errors import AdaptraError
from megatron_adaptra.base.log import GOES_ON, log_line
from megatron_adaptra.execute.small.all_gather import AllGather
from megatron_adaptra.execute.small.small_collectives import SmallCollectives
from megatron_adaptra.measure.iteration_record import CollectiveSpan

_NONE = -1.0  # Megatron's value for a rank that has none
_RESULT = struct.Struct("<Bdd")  # success, gradient norm, zeros
_FIRST_COMPARED = 4  # the step whose results are the first to be compared between stages
_AGREED = [target.rpartition(":")[2] for target in PATCHES["step-agreement"].targets]


class StepResultSync:
    """A StepResultSync stands in for `optimizer.step` and for the agreement on its results.

    `session`: the rank's Session, whose small collectives come with its first iteration.
    `scheduler`: Megatron's, of learning rates. `known`: the last step's result is taken to be the
    same everywhere. `compared`: results are exchanged, on all ranks of the job.
    """

    def __init__(self, optimizer: Any, scheduler: Any, session: Any) -> None:
        from megatron.training import get_args

        self._session, self._zeros = session, bool(get_args().log_num_zeros_in_grad)
        self.known = self.compared = False
        self._trusted = False  # all have agreed before
        self._differed = False  # after that: all ask each other for good
        self._mine = b""  # the last step's, to be sent
        self._sent = False  # it was, and is to be compared
        self._steps = 0
        self._scheduler, self._scheduled = scheduler, 0  # its steps at the end of the last step
        self._all_gather: AllGather | None = None
        self._skipped: dict[str, list[CollectiveSpan]] = {}  # what agreeing has taken, by function
        self._optimizer, self._step = optimizer, optimizer.step

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Let the training loop step through this object, and agree by it, in a `with`."""
        training = sys.modules["megatron.training.training"]

        @functools.wraps(self._step)
        def step(*args: Any, **kwargs: Any) -> Any:
            return self.step(*args, **kwargs)

        agreed = {name: self._agreed(name, getattr(training, name)) for name in _AGREED}
        with patch("step-result", self._optimizer, step=step), patch("step-agreement", **agreed):
            yield

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's step, whose results are then known, or exchanged.

        Raises AdaptraError if gradients are still on their way, and, under `--adaptra-strict`, if
        ranks have had other results of the step before.
        """
        self.known = False
        collectives = self._session.small_collectives
        if collectives is None or not collectives.active:
            self._mine = b""
            return self._step(*args, **kwargs)
        self._send(collectives)  # where Megatron has not logged that step
        self._compare()
        result = self._step(*args, **kwargs)
        if collectives.pending:
            raise AdaptraError(
                "this optimizer has stepped without a word of the other stages, though gradients "
                "were on their way: use --adaptra-small-collectives off"
            )
        if isinstance(result, tuple) and len(result) == 3:
            success, norm, zeros = result
            self._mine = _RESULT.pack(bool(success), _number(norm), _number(zeros))
            self._scheduled = getattr(self._scheduler, "num_steps", 0)
            self.known = self._trusted
            if not self.known:
                self._prefetch(collectives, result)
        return result

    def _prefetch(self, collectives: SmallCollectives, result: Any) -> None:
        """Send norm and zeros along with the first value that is agreed on."""
        values = [_number(value) for value in result[1 : 2 + self._zeros]]
        tensors = [torch.tensor([value], dtype=torch.float32) for value in values]
        group = mpu.get_model_parallel_group()
        collectives.prefetch([(tensor, dist.ReduceOp.MAX) for tensor in tensors], group)

    def logged(self) -> None:
        """Send the step's result to the others of the model, at the end of an iteration."""
        if (collectives := self._session.small_collectives) is not None and collectives.active:
            self._send(collectives)

    def _send(self, collectives: SmallCollectives) -> None:
        """Send the others the last step's result, to be compared before the next step.

        They are compared earlier if this rank waits for others outside of steps: it has waited for
        none since the step, and might wait there, longer than stock does, for a rank late twice.
        """
        mine, self._mine = self._mine, b""
        if not mine:
            return
        self._steps += 1
        if self._steps == _FIRST_COMPARED:
            members = collectives.members(mpu.get_model_parallel_group())
            if members:
                self._all_gather = collectives.open_all_gather(members, _RESULT.size)
                collectives.outside = self._compare
        if self._all_gather is None or self._differed:
            return
        self._all_gather.start(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        self._sent = True

    def _compare(self) -> None:
        """Learn whether all ranks of the model have had the same result of the step before."""
        if self._all_gather is None or not self._sent:
            return
        self._sent, self.compared = False, True
        packed = [bytes(result.tolist()) for result in self._all_gather.wait()]
        before = [_RESULT.unpack(result) for result in packed]
        if len(set(packed)) == 1:  # bytes: a norm that is not a number equals itself, too
            # A rank without a norm has nothing to train, or its step was skipped.
            self._trusted = self._trusted or before[0][1] != _NONE
        elif self._trusted:
            self._trusted, self._differed = False, True
            members = self._session.small_collectives.members(mpu.get_model_parallel_group())
            self._say_who(members, packed, before[members.index(dist.get_rank())])
            added = getattr(self._scheduler, "num_steps", 0) - self._scheduled
            if added and not all(success for success, _, _ in before):  # stock adds on no rank
                self._scheduler.step(increment=-added)

    def _say_who(
        self, members: Sequence[int], packed: Sequence[bytes], mine: tuple[bool, float, float]
    ) -> None:
        """Log that `members` have had other results, at the first rank that has no usual one.

        `packed`: theirs; `mine`: this rank's.
        """
        usual = Counter(packed).most_common(1)[0][0]
        odd = next(i for i, one in enumerate(packed) if one != usual)
        words = (
            f"rank {members[odd]} has had another result of a step than other ranks of its model"
        )
        if self._session.config.strict:
            raise AdaptraError(f"{words}; use --adaptra-small-collectives off")
        if members[odd] == dist.get_rank():
            success, norm, zeros = mine
            log_line(
                f"{words}, on host {socket.gethostname()}: success {bool(success)}, gradient norm "
                f"{norm:g}, zeros {zeros:g}; {GOES_ON}, these ranks ask each other after each step"
            )

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
        """Agree by `native`, and keep its spans: they are skipped once values are known."""
        began = time.monotonic()
        collectives.hiding = True
        try:
            return native()
        finally:
            collectives.hiding = False
            self._skipped[name] = collectives.spans_since(began)


def _number(value: Any) -> float:
    return _NONE if value is None else float(value)
