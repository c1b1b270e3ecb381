"""An ActivationMeter whose failures end the adaptation alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_adaptra.adapter.pipeline.memory import ActivationMeter
from megatron_adaptra.agree.guard import Guard


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
