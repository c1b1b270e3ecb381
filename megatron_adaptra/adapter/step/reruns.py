"""Megatron's question whether to run an iteration again, answered after the fact.

Before the optimizer's step all ranks agree on whether one of them has seen a result that it wants
to see again (rerun_state_machine.py). Nearly always nobody has. So each rank informs the others,
goes on as if nobody had, and learns better with the gradient norm, before the step has changed
anything: then the iteration is run again, as Megatron would have done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_adaptra.adapter.compat.patches import patch
from megatron_adaptra.execute.small.collective import SmallCollective


class Rerun(Exception):
    """A rank wants the iteration to be run again."""


class Reruns:
    """Stands between a training loop and Megatron's state machine.

    `timers`: Megatron's. `say`: says a sentence at rank 0.
    """

    def __init__(self, timers: Any, say: Callable[[str], None]) -> None:
        from megatron.core import rerun_state_machine as module

        self._module, self._machine = module, module.get_rerun_state_machine()
        self._timers, self._say = timers, say
        self._asking = False
        self._trusting = True
        self._again = 0  # iterations
        self._run = self._machine.should_run_forward_backward

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """While Megatron's loop asks us whether to go on."""

        def should_run_forward_backward(data_iterator: Any) -> bool:
            return self._should_run(data_iterator)

        ours = should_run_forward_backward
        with patch("reruns", self._machine, should_run_forward_backward=ours):
            yield
        if self._again:
            self._say(f"iterations run again after their end: {self._again}")

    def defer(self, collective: SmallCollective, tensor: torch.Tensor) -> Callable[[], None] | None:
        """A DeferHook: whether this all-reduce is the question, which nobody waits for."""
        if not self._asking or collective.name != "all_reduce" or tensor.numel() != 1:
            return None
        tensor.zero_()

        def learn() -> None:
            if tensor.item() > 0:
                raise Rerun

        return learn

    def train(self, train_step: Callable[[], Any]) -> Any:
        """Megatron's `train_step`, once more if it turns out that a rank wants it."""
        try:
            with _stopped_on(Rerun, self._timers):
                return train_step()
        except Rerun:
            self._again += 1
            # As it was when the question was put: it will be put again, and waited for.
            self._machine.state = self._module.RerunState.INITIAL_RUN
            self._trusting = False
            return train_step()

    def _should_run(self, data_iterator: Any) -> bool:
        states, modes = self._module.RerunState, self._module.RerunMode
        usual = self._machine.mode == modes.VALIDATE_RESULTS and self._trusting
        self._asking = usual and self._machine.state == states.INITIAL_RUN
        try:
            again: bool = self._run(data_iterator)
        finally:
            self._asking, self._trusting = False, True
        return again


@contextlib.contextmanager
def _stopped_on(error: type[Exception], timers: Any) -> Iterator[None]:
    """Stop timers of Megatron's that the body has started when it raises such an `error`.

    They would refuse a second start. `timers`: or None.
    """
    before = _running(timers)
    try:
        yield
    except error:
        for timer in _running(timers) - before:
            timer.stop()
        raise


def _running(timers: Any) -> set[Any]:
    known = getattr(timers, "_timers", {}).values()
    return {timer for timer in known if getattr(timer, "_started", False)}
