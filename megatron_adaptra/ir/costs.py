"""The costs of ops and messages that the clock asks for."""

from __future__ import annotations

from typing import Protocol

from megatron_adaptra.ir.conditions import LinkState
from megatron_adaptra.ir.op import Kind


class Costs(Protocol):
    """A cost model gives the clock the seconds of each op and message.

    `Conditions` are one for a single pipeline, `ReplicaConditions` for several replicas. A worker
    is a stage of the pipeline, or one stage of one replica.
    """

    @property
    def workers(self) -> int:
        """The number of workers."""

    @property
    def microbatches(self) -> int:
        """The number of microbatches that each replica runs in an iteration."""

    @property
    def cores(self) -> float | None:
        """Compute slots that the workers share; None where each has a device of its own."""

    @property
    def step_work(self) -> float:
        """Seconds of the step in which no stage waits for another."""

    @property
    def step_sync(self) -> tuple[float, ...]:
        """Seconds of the step in which the stages wait for each other, one by one."""

    def seconds(self, kind: Kind, worker: int) -> float:
        """Return the seconds that an op of this `kind` takes on `worker` with a core to itself."""

    def on_core(self, worker: int) -> float:
        """The share of these seconds in which `worker` needs one of the `cores`; 0 to 1."""

    def link(self, source: int, target: int) -> LinkState:
        """Return the link from worker `source` to worker `target`."""

    def wire(self, source: int, target: int) -> float:
        """Seconds for which one message keeps the link from `source` to `target` busy."""

    def port(self, worker: int) -> float:
        """Return the seconds for which one message keeps the port of `worker` busy.

        0 where it is not limited.
        """
