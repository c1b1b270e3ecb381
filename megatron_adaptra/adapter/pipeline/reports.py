"""The measurements of a rank: sent to its leader, and kept for what shows them."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any

from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs, config_of, models_of
from megatron_adaptra.adapter.pipeline.memory import with_free_memory
from megatron_adaptra.adapter.pipeline.run import Run
from megatron_adaptra.adapter.pipeline.wiring import RankContext
from megatron_adaptra.measure.iteration_record import IterationRecord
from megatron_adaptra.measure.report import Memory

_DIGITS = 8
_OWN = ("layer_number", "current_microbatch")  # attributes of alike layers that may differ
_PLAIN = (bool, int, float, str)
KEPT = 1000  # records of iterations at most, the last ones


class Reports:
    """A Reports sends the leader what this rank has measured, once it is known.

    `records`: measurements of the iterations in `keep_records`. `counted`: iterations whose bytes
    were counted. `layers`: see StageReport.
    """

    def __init__(self, context: RankContext) -> None:
        self.keep_records: Container[int] = ()
        self.records: list[IterationRecord] = []
        self.counted: list[tuple[int, Memory]] = []
        self.layers = ""
        self._context = context
        self._unsent: deque[tuple[Run, IterationRecord]] = deque()

    def add(self, run: Run, record: IterationRecord, met: str) -> None:
        """Take the `record` of an iteration of a `run`. `met`: see StageReport."""
        record.met, record.layers = met, self.layers
        if record.memory is not None and record.memory.per_microbatch:
            self.counted = [*self.counted[1 - KEPT :], (record.iteration, record.memory)]
        if record.iteration in self.keep_records:
            self.records = [*self.records[1 - KEPT :], record]
        self._unsent.append((run, record))

    def clear(self) -> None:
        """Drop what is not sent yet."""
        self._unsent.clear()

    def send(self) -> None:
        """Send the iterations that are known by now; on the guard's thread.

        An iteration without usable times is left out: no plan is made from it.
        """
        self._context.probe.read()
        while self._unsent and self._unsent[0][1].known:
            run, record = self._unsent.popleft()
            wiring = run.wiring
            record.probed = [] if wiring.probes is None else wiring.probes.take()
            if record.unusable:
                self._context.say(f"an iteration was not measured: {record.unusable}")
                continue
            record.memory = with_free_memory(record.memory)
            if record.memory is not None and wiring.staging is not None:
                pinned = wiring.staging.memory().peak  # the most since this plan began
                record.memory = replace(record.memory, pinned=pinned)
            ranks = self._context.workers
            record.through = {one: wiring.wire.through(ranks[one]) for one in record.sources}
            run.controller.report(record)


def layers_of(arguments: ScheduleArgs) -> str:
    """Return a text that is equal for stages whose layers are alike, chunk by chunk.

    Of each chunk it has the number of layers, of their parameters, and a digest of their modules,
    by type, shapes of parameters and settings. It is empty where layers are not known, and with
    experts, as these get other numbers of tokens on each stage.
    """
    if getattr(config_of(arguments), "num_moe_experts", None):
        return ""
    chunks = [_chunk(model) for model in models_of(arguments)]
    return "+".join(chunks) if all(chunks) else ""


def _chunk(model: Any) -> str:
    while not hasattr(model, "decoder") and hasattr(model, "module"):  # a wrapper, such as DDP
        model = model.module
    layers = getattr(getattr(model, "decoder", None), "layers", None)
    if not layers:
        return ""
    text = "\n".join(line for layer in layers for line in _modules(layer))
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
    parameters = sum(one.numel() for one in layers.parameters())
    return f"{len(layers)}x{parameters}-{digest}"


def _modules(layer: Any) -> Iterator[str]:
    for module in layer.modules():
        shapes = [tuple(one.shape) for one in module.parameters(recurse=False)]
        settings = sorted(
            f"{name}={value}"
            for name, value in vars(module).items()
            if name not in _OWN and isinstance(value, _PLAIN)
        )
        yield f"{type(module).__name__} {shapes} {settings}"
