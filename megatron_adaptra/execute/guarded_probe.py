"""A Probe whose failures end the adaptation alone."""

from __future__ import annotations

import contextlib

from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.device.base import Device
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
