"""What things cost, as the clock asks for it."""

from __future__ import annotations

from typing import Protocol

from megatron_adaptra.ir.conditions import LinkState
from megatron_adaptra.ir.op import Kind


class Costs(Protocol):
    """What the clock asks: of one pipeline `Conditions`, of several replicas `ReplicaConditions`.

    A worker is a stage, of several replicas one stage of one of them.
    """

    @property
    def workers(self) -> int:
        """How many there are."""

    @property
    def microbatches(self) -> int:
        """Of an iteration, per replica."""

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
        """What an op of this kind costs on `worker`."""

    def on_core(self, worker: int) -> float:
        """The share of these seconds in which `worker` needs one of the `cores`; 0 to 1."""

    def link(self, source: int, target: int) -> LinkState:
        """From worker `source` to worker `target`."""

    def wire(self, source: int, target: int) -> float:
        """Seconds for which one message keeps the link from `source` to `target` busy."""

    def port(self, worker: int) -> float:
        """Seconds for which one message keeps what `worker` sends or receives by busy.

        0 where it is not limited.
        """
