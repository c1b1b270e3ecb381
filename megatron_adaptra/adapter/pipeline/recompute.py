"""Forwards whose activations are not kept, and their repetition at a place of the schedule's.

The first run makes the same computation as any other, but what autograd would save is dropped at
once; the stage's input, the random states, the buffers that it changes and what came from the data
iterator are kept. The second run starts from these, so that dropout falls on the same values,
experts are balanced by the same counts, and the results are the same to the last bit. Other effects
of a forward (running statistics, counts of experts' tokens, auxiliary losses for the log,
validation of the loss) stay as the first run has left them.

Both runs have gradients enabled, unlike those of activation checkpointing: some layers choose
another kernel, or another order, where they are not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import rerun_state_machine
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils

from megatron_adaptra.adapter.compat.patches import patch


class Replay:
    """A replay keeps what it takes to run a forward again that has kept no activations.

    `data`: what the forward's data iterator gave it, in order.
    """

    def __init__(self) -> None:
        self.data: list[Any] = []
        self._states: Any = None
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextlib.contextmanager
    def discard(self, model: torch.nn.Module) -> Iterator[None]:
        """Drop the activations of the first run, in a `with`; its output must be detached."""
        self._states = random._get_all_rng_states()
        before = _versions(buffers_of(model))
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, _dropped):
            yield
        self._buffers = _changed(before)

    @contextlib.contextmanager
    def recompute(self, model: torch.nn.Module) -> Iterator[None]:
        """Prepare the second run, which makes the activations, in a `with`.

        Afterwards random states and statistics are as they were before. The loss is not validated
        again.
        """
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        logged = [entry["values"] for entry in tracker.values()]
        before = _versions([*buffers_of(model), *logged])
        _restore(self._buffers)
        machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE  # asking for it would make one
        with contextlib.ExitStack() as stack:
            if machine is not None:
                stack.enter_context(patch("recompute", machine, validate_result=_validated))
            stack.enter_context(random._fork_rng())
            random._set_all_rng_states(*self._states)
            yield
        _restore(_changed(before))

    def recording(self, data: Any) -> Any:
        """Return the data iterator for the first run, around Megatron's `data`; None for None."""
        return None if data is None else _Recorded(data, self.data)

    def replaying(self, data: Any) -> Any:
        """Return the data iterator for the second run, for Megatron's `data`; None for None."""
        return None if data is None else iter(self.data)


class _Recorded:
    """A _Recorded passes on what an iterator gives, and keeps it."""

    def __init__(self, source: Any, into: list[Any]) -> None:
        self._source, self._into = source, into

    def __iter__(self) -> _Recorded:
        return self

    def __next__(self) -> Any:
        item = next(self._source)
        self._into.append(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def _validated(*_: Any, **__: Any) -> None:
    """Validate nothing: Megatron counts validations, and keeps the first ones' greatest loss."""


def _dropped(_: None) -> torch.Tensor:
    raise RuntimeError("a backward through a forward whose activations were not kept")


def buffers_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return a module's buffers; `buffers` of Megatron's data-parallel wrapper are others."""
    return [buffer for _, buffer in model.named_buffers()]


def _versions(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Return each tensor, which forwards may change, with a copy of its value, and its version."""
    return [(tensor, tensor.clone(), tensor._version) for tensor in tensors]


def _changed(
    before: list[tuple[torch.Tensor, torch.Tensor, int]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tensors that have changed since, with the values that they had."""
    return [(tensor, value) for tensor, value, version in before if tensor._version != version]


def _restore(values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give each tensor its value again."""
    for tensor, value in values:
        tensor.copy_(value)
