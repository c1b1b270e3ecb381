"""The executor: one handler per kind of op, called in the order of the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_adaptra.base.errors import ScheduleError
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Line

Handler = Callable[[Op], None]


def execute(line: Line, handlers: Mapping[Kind, Handler]) -> None:
    """Run one stage's line. It decides nothing; raises ScheduleError for a kind without handler."""
    for op in line:
        handler = handlers.get(op.kind)
        if handler is None:
            can = ", ".join(sorted(k.value for k in handlers))
            raise ScheduleError(f"{op}: this executor runs {can}")
        handler(op)
