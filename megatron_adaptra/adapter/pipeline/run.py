"""Training with one number of microbatches: the replan loop, and the program that is in force."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_adaptra.adapter.pipeline.wiring import RankContext, Wiring
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Line
from megatron_adaptra.ir.unused_posts import first_posts, unused_posts
from megatron_adaptra.runtime.controller import Controller


class Run:
    """From its start on, the iteration to come has begun: all ranks know its `program`.

    `controller`: this rank's part in the replan loop. `microbatches`: per iteration. `iteration`:
    the first one of this run. `new_message()` makes an empty tensor for a message of the pipeline.
    """

    def __init__(
        self,
        context: RankContext,
        wiring: Wiring,
        controller: Controller,
        microbatches: int,
        iteration: int,
        new_message: Callable[[], torch.Tensor],
    ) -> None:
        self.wiring, self.controller, self.microbatches = wiring, controller, microbatches
        self._context = context
        self._schedule = controller.begin(iteration)
        wiring.mailbox.begin(iteration, new_message)
        self.program = lower(self._schedule, context.ahead)

    @property
    def line(self) -> Line:
        """This stage's ops in the iteration to come."""
        return self.program.order[self._context.stage]

    def begin(self, iteration: int, new_message: Callable[[], torch.Tensor]) -> None:
        """The boundary before `iteration`: its program, its first receives."""
        schedule = self.controller.begin(iteration)
        self.wiring.mailbox.begin(iteration, new_message)
        if schedule is not self._schedule:
            self.wiring.small_collectives.measure_again(self.wiring.plan_group.members)
            self._schedule, self.program = schedule, lower(schedule, self._context.ahead)
        for op in first_posts(self.program, self._context.stage):
            self.wiring.mailbox.post(op)

    def abandon(self) -> None:
        """End the run although an iteration has begun, as all ranks do: another one follows."""
        self.controller.close()
        self.wiring.mailbox.discard(unused_posts(self.program, self._context.stage))
        self.wiring.small_collectives.measure_again(self.wiring.plan_group.members)

    def close(self) -> None:
        """End the run and close its connections."""
        self.wiring.mailbox.close()
        self.controller.close()
        self.wiring.close()
