"""When the data-parallel synchronisation of gradients and parameters starts, as Megatron does it.

Megatron's model wrapper reduces a bucket of gradients as soon as the last microbatch has filled it,
so synchronisation is paused but for each chunk's last weight gradient. With functions of the
optimizer's (`grad_sync_func`, `param_sync_func`) stages start theirs at the same moment instead:
with one chunk, stages after the first do it when all backwards are over; with several, a stage
waits for as many backwards as there are stages before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Line

_WEIGHTS = (Kind.B, Kind.W)


class GradSync:
    """A GradSync starts the synchronisations in one iteration of one stage.

    `config`: the model's; `models`: its chunks; `line`: the ops it is going to run; `stage`: its
    index.
    """

    def __init__(self, config: Any, models: Sequence[Any], line: Line, stage: int) -> None:
        self._config, self._models, self._stage = config, models, stage
        self._paused: contextlib.ExitStack | None = None
        weights = [op for op in line if op.kind in _WEIGHTS]
        self._last = {op.chunk: op for op in weights}  # of each chunk
        self._turn = {op: i for i, op in enumerate(weights)}
        self._synchronised: set[int] = set()
        forwards = [op for op in line if op.kind is Kind.F]
        self._first = {i: op.chunk for i, op in enumerate(forwards) if op.microbatch == 0}
        self._forwards = 0
        self._grads, self._params = (
            _each(function, len(models)) for function in (config.grad_sync_func, _params(config))
        )

    @property
    def paused(self) -> bool:
        """True while synchronisation is paused: no bucket is reduced, however full it is."""
        return self._paused is not None

    def begin(self) -> None:
        """Pause reductions; with several chunks, gather the parameters of the first two."""
        self._pause()
        if len(self._models) > 1 and self._params:
            for chunk in (0, 1):
                self._params[chunk](self._models[chunk].parameters())

    def before_forward(self) -> None:
        """Gather the parameters of the chunk after the one that all stages start now."""
        turn, self._forwards = self._forwards + self._stage, self._forwards + 1
        if len(self._models) > 1 and self._params and turn in self._first:
            chunk = self._first[turn] + 1
            if 1 < chunk < len(self._models):
                self._params[chunk](self._models[chunk].parameters())

    def before_weights(self, op: Op) -> None:
        """Resume reductions for `op`, a backward or its weight half, if it is its chunk's last."""
        alone = len(self._models) == 1
        if op == self._last[op.chunk] and (not self._grads or (alone and self._stage == 0)):
            self._resume()
            self._synchronised.add(op.chunk)

    def after_weights(self, op: Op) -> None:
        """Start the reductions of chunks whose turn it is after that `op`, and pause again."""
        if len(self._models) == 1:
            return
        if self._grads:
            turn = self._turn[op] - self._stage
            for chunk, last in self._last.items():
                if self._turn[last] == turn:
                    self._start(chunk)
        self._pause()

    def end(self) -> None:
        """Start all reductions that have not been started; then gradients can be finalised."""
        self._resume()
        for chunk, model in enumerate(self._models):
            if self._grads and chunk not in self._synchronised:
                self._start(chunk)
            elif not self._grads and chunk not in self._last and _overlaps(model):
                model.start_grad_sync()  # which Megatron does with the last gradient of a bucket

    def _start(self, chunk: int) -> None:
        self._resume()
        self._grads[chunk](self._models[chunk].parameters())
        self._synchronised.add(chunk)

    def _pause(self) -> None:
        if self._paused is None:
            self._paused = contextlib.ExitStack()
            for no_sync in _each(self._config.no_sync_func, 1):
                self._paused.enter_context(no_sync())

    def _resume(self) -> None:
        if self._paused is not None:
            self._paused.close()
            self._paused = None


def _overlaps(model: Any) -> bool:
    return bool(getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False))


def _params(config: Any) -> Any:
    return getattr(config, "param_sync_func", None)


def _each(functions: Any, count: int) -> list[Any]:
    """Return Megatron's function for all chunks, or its list of them, as a list by chunk."""
    if functions is None:
        return []
    return list(functions) if isinstance(functions, list) else [functions] * count
