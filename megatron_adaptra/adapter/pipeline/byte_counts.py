"""Bytes of activations: when they are measured, and how, where Megatron runs the ops."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from megatron_adaptra.adapter.compat.patches import patch
from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs, models_of
from megatron_adaptra.adapter.pipeline.memory import ActivationMeter
from megatron_adaptra.adapter.pipeline.recompute import buffers_of
from megatron_adaptra.adapter.pipeline.wiring import RankContext
from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.program import Program


class GuardedMeter:
    """The methods of an ActivationMeter, called through a `guard`, as those of a GuardedProbe.

    `chunks`, `counted`, `ignored`: of the meter.
    """

    def __init__(
        self, guard: Guard, chunks: int, counted: bool, ignored: Iterable[torch.Tensor]
    ) -> None:
        meter = guard.call(ActivationMeter, chunks, counted, ignored)
        self.begins = guard.method(meter, ActivationMeter.begins)
        self.hold_whole = guard.method(meter, ActivationMeter.hold_whole)
        self.hold_recomputed = guard.method(meter, ActivationMeter.hold_recomputed)
        self.hold_half = guard.method(meter, ActivationMeter.hold_half)
        self.release = guard.method(meter, ActivationMeter.release)
        self.end = guard.method(meter, ActivationMeter.end)


class ByteCounts:
    """A ByteCounts measures one iteration per program, never the first, in which caches fill."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._warm = False
        self._counted: Program | None = None

    def due(self, program: Program) -> bool:
        """Return whether to measure the iteration to come, of `program`; ask once per iteration."""
        due = self._warm and self._counted is not program
        self._warm = True
        if due:
            self._counted = program
        return due

    @contextlib.contextmanager
    def around(self, program: Program, arguments: ScheduleArgs) -> Iterator[None]:
        """Measure an iteration of `program`, with Megatron's `arguments`, if that is due.

        It is never due without a budget in bytes.
        """
        context = self._context
        if not (context.budget.in_bytes and self.due(program)):
            yield
            return
        models = models_of(arguments)
        ignored = (t for model in models for t in (*model.parameters(), *buffers_of(model)))
        meter = GuardedMeter(context.guard, len(models), True, ignored)
        line = program.order[context.worker]
        forwards, backwards = (iter([o for o in line if o.kind is k]) for k in (Kind.F, Kind.B))

        def forward(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            op = next(forwards)
            meter.begins()
            result = function(*args, **kwargs)
            output = result[0][0] if isinstance(result[0], list) else result[0]
            given = inspect.signature(function).bind_partial(*args, **kwargs).arguments
            received = given.get("input_tensor")
            received = received[0] if isinstance(received, list) else received
            meter.hold_whole(op[1:], output, received)
            return result

        def backward(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            op = next(backwards)
            meter.release(op[1:])
            return result

        with patch(
            "op-times",
            forward_step=_around(schedules.forward_step, forward),
            backward_step=_around(schedules.backward_step, backward),
        ):
            yield
        context.probe.holds(meter.end())


def _around(function: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return ours(function, *args, **kwargs)

    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return run
