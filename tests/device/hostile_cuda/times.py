"""What the product says about times, against what the device really did."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fakes.hostile_cuda.driver import Driver
from hostile_cuda.jobs import Job
from hostile_cuda.stage_model import label

from megatron_adaptra.device.base import Mark
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.measure.iteration_record import IterationRecord
from megatron_adaptra.measure.probe import Probe

if TYPE_CHECKING:
    from hostile_cuda.ranks import Result

GRAIN = 100e-6  # seconds: what two clocks may drift in a test, and what floats round off
_LOOKS = 2000


def moments(marks: Sequence[tuple[str, Mark]]) -> dict[str, float | str]:
    """By what was marked its moment, or why there is none; all work is over."""
    pause, found = threading.Event(), {}
    for name, mark in marks:
        for _ in range(_LOOKS):
            if (at := mark.at()) is not None or mark.fault:
                break
            pause.wait(0.001)  # for the anchor, which the device's thread stamps
        found[name] = mark.fault if at is None else at
    return found


def known(probe: Probe, records: Sequence[IterationRecord]) -> None:
    """Have `probe` read what it has marked; all work is over."""
    pause = threading.Event()
    for _ in range(_LOOKS):
        probe.read()
        if all(record.end for record in records):
            return
        pause.wait(0.001)


def times(driver: Driver, job: Job, results: Sequence[Result]) -> list[str]:
    """Moments before their time, and messages that were sent before they were made."""
    wrong = []
    for rank, result in enumerate(results):
        for name, at in result.moments.items():
            ended = driver.span(name, rank)[1]
            if isinstance(at, str) and "older than every anchor" in at and name.endswith("in 0"):
                continue  # nothing tied the clocks yet
            if isinstance(at, str):
                wrong.append(f"time: the mark behind {name} was not read: {at or 'no anchor'}")
            elif at < ended - GRAIN:
                wrong.append(f"time: {name} ended {1e3 * (ended - at):.3f} ms after its mark says")
        for iteration, record in enumerate(result.records):
            wrong += _of(driver, job, rank // job.stages, iteration, record)
    return wrong


def _of(
    driver: Driver, job: Job, replica: int, iteration: int, record: IterationRecord
) -> list[str]:
    wrong = []

    def ended(op: Op, stage: int) -> float:
        kind = "I" if op.kind is Kind.B else op.kind.value
        position = op.chunk * job.stages + stage
        name = label(kind, iteration, op.microbatch, position)
        return driver.span(name, job.rank(replica, stage))[1]

    if (record.unusable and iteration) or not record.end:  # at first nothing ties the clocks
        wrong.append(f"time: of iteration {iteration} of stage {record.worker}: {record.unusable}")
    for one in record.ops:
        early = ended(one.op, record.worker) - one.end
        if early > GRAIN:
            wrong.append(f"time: {one.op} ended {1e3 * early:.3f} ms after its record says")
    for source, op, stamps in record.messages:
        early = ended(op, source) - stamps.sent
        if early > GRAIN:
            wrong.append(
                f"time: {op} of stage {source} was sent {1e3 * early:.3f} ms before its end"
            )
        if stamps.completed < stamps.sent - GRAIN:
            wrong.append(f"time: {op} of stage {source} was there before it was sent")
    return wrong
