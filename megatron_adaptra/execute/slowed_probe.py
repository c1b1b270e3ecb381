"""The probe of an emulated slow worker."""

from __future__ import annotations

from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.device.base import Device
from megatron_adaptra.emulate.worker_emulator import WorkerEmulator
from megatron_adaptra.execute.guarded_probe import GuardedProbe
from megatron_adaptra.ir.op import Op


class SlowedProbe(GuardedProbe):
    """A probe of a slow worker: each op ends when its `emulator` has waited.

    `guard`, `worker`, `clock`: see GuardedProbe. The waits do not go through the guard: a worker is
    as slow when nothing adapts any more.
    """

    def __init__(self, guard: Guard, worker: int, clock: Device, emulator: WorkerEmulator) -> None:
        super().__init__(guard, worker, clock)
        measured_begin, measured_end = self.op_begins, self.op_ends
        since = 0.0

        def op_begins() -> None:
            nonlocal since
            measured_begin()
            since = emulator.work()

        def op_ends(op: Op) -> None:
            emulator.wait(since, op.kind)
            measured_end(op)

        self.op_begins, self.op_ends = op_begins, op_ends
