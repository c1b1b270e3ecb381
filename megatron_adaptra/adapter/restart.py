"""Beginning an iteration anew, when the verdict on the last step turns out to be bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import tensor_parallel

from megatron_adaptra.adapter.postvalidation import PostValidation, Restart
from megatron_adaptra.adapter.timers import stopped_on
from megatron_adaptra.ir.gate import Gate
from megatron_adaptra.runtime.mailbox import Mailbox

Run = Callable[[dict[str, Any]], Any]  # Megatron's arguments -> what its schedule returns


def run_on_trust(
    post: PostValidation,
    mailbox: Mailbox,
    gate: Gate,
    arguments: dict[str, Any],
    timers: Any,
    run: Run,
) -> Any:
    """Run an iteration of which the parameters may turn out to be wrong up to its gate."""
    batches, randomness = _Batches(arguments["data_iterator"]), _Randomness()

    def verdict() -> None:
        if not post.settle():
            raise Restart
        batches.forget()

    mailbox.gate = (gate.op, verdict)
    given = {**arguments, "data_iterator": batches.iterator}
    try:
        with stopped_on(Restart, timers):
            return run(given)
    except Restart:
        mailbox.drop(gate.messages)
        mailbox.probe.begin_anew()
        batches.rewind()
        randomness.restore()
    return run(given)


class _Randomness:
    """The state of dropout's generators."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._device = torch.cuda.get_rng_state()
        self._tracker = tensor_parallel.get_cuda_rng_tracker().get_states()

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        torch.cuda.set_rng_state(self._device)
        tensor_parallel.get_cuda_rng_tracker().set_states(self._tracker)


class _Batches:
    """Microbatches that can be had again. Megatron's iterator may be a list of one, or None."""

    def __init__(self, given: Any) -> None:
        self._in_list = isinstance(given, list)
        inner = given[0] if self._in_list else given
        self._replay = _Replay(inner) if inner is not None else None

    @property
    def iterator(self) -> Any:
        return [self._replay] if self._in_list else self._replay

    def rewind(self) -> None:
        if self._replay is not None:
            self._replay.again = iter(self._replay.kept or ())
            self._replay.kept = None

    def forget(self) -> None:
        if self._replay is not None:
            self._replay.kept = None


class _Replay:
    """Looks like the iterator it stands for."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.kept: list[Any] | None = []
        self.again: Iterator[Any] = iter(())

    def __iter__(self) -> _Replay:
        return self

    def __next__(self) -> Any:
        for batch in self.again:
            return batch
        batch = next(self.inner)
        if self.kept is not None:
            self.kept.append(batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
