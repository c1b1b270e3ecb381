"""One microbatch for a worker from which a plan has taken all: so it shows what it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_adaptra.ir.routes import worker_name
from megatron_adaptra.ir.schedule import Line, Schedule


def one_back(schedule: Schedule, worker: int, seconds: Callable[[Schedule], float]) -> Schedule:
    """The `schedule` with one microbatch of the worker's home at home on it again.

    Of all microbatches the one that makes an iteration the least longer.

    Args:
        schedule: of several replicas.
        worker: without any op.
        seconds: what an iteration of a schedule takes.
    """
    home, stage = divmod(worker, schedule.stages)
    options = [_moved(schedule, worker, home, stage, i) for i in range(schedule.microbatches)]
    return min(options, key=seconds)


def _moved(schedule: Schedule, worker: int, home: int, stage: int, microbatch: int) -> Schedule:
    runner = schedule.routes.worker(stage, microbatch, home)
    lines: list[Line] = list(schedule.order)
    which = home, microbatch
    lines[worker] = tuple(op for op in lines[runner] if (op.home, op.microbatch) == which)
    lines[runner] = tuple(op for op in lines[runner] if (op.home, op.microbatch) != which)
    why = f"worker {worker_name(worker, schedule.stages)} runs one microbatch"
    return replace(schedule, order=tuple(lines), why=why)
