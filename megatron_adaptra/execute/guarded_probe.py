"""A Probe whose failures end the adaptation alone, and that of an emulated slow worker."""

from __future__ import annotations

import contextlib

from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.device.base import Device
from megatron_adaptra.emulate.worker_emulator import WorkerEmulator
from megatron_adaptra.ir.op import Op
from megatron_adaptra.measure.probe import Probe


class GuardedProbe:
    """The methods of a Probe of `worker` with a `clock`, called through a `guard`.

    They do nothing and return None once something has failed, here or elsewhere.
    """

    def __init__(self, guard: Guard, worker: int, clock: Device) -> None:
        self._probe = probe = guard.call(Probe, worker, clock)
        self.begin = guard.method(probe, Probe.begin)
        self.op_begins = guard.method(probe, Probe.op_begins)
        self.op_ends = guard.method(probe, Probe.op_ends)
        self.waited = guard.method(probe, Probe.waited)
        self.loads = guard.method(probe, Probe.loads)
        self.loaded = guard.method(probe, Probe.loaded)
        self.asks = guard.method(probe, Probe.asks)
        self.answered = guard.method(probe, Probe.answered)
        self.arrived = guard.method(probe, Probe.arrived)
        self.holds = guard.method(probe, Probe.holds)
        self.spoilt = guard.method(probe, Probe.spoilt)
        self.pipeline_ends = guard.method(probe, Probe.pipeline_ends)
        self.iteration_ends = guard.method(probe, Probe.iteration_ends)
        self.read = guard.method(probe, Probe.read)

    def close(self) -> None:
        """Close what is open, also when something has failed."""
        if self._probe is not None:
            with contextlib.suppress(Exception):
                self._probe.close()


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
