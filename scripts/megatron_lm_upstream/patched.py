"""Puts the plugin in front of Megatron's schedule functions, where upstream's tests look for them.

A training program activates once, after its groups have been made, and calls what it then
fetches. These tests make new groups every time, also call the functions by name, and compare what
they fetch with what they name. So behind each name stands a function that activates the plugin when
it is first called, and that calls what Megatron's training loop would have fetched; the plugin is
undone when the groups are.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from megatron_adaptra.adapter.compat.patch_attr import find
from megatron_adaptra.adapter.compat.patches import PATCHES
from megatron_adaptra.adapter.compat.schedule_args import models_of
from megatron_adaptra.adapter.entry.activate import Activation, activate
from megatron_adaptra.adapter.pipeline.session import Session
from megatron_adaptra.base.log import LogOnce
from megatron_adaptra.config import AdaptraConfig

Function = Callable[..., Any]
NAMES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


class Front:
    """What stands in front of Megatron's schedules in this process, from its start to its end.

    Without a `config` it calls Megatron, and only listens. `calls` of a schedule: by "us" or by
    "Megatron", why, the kinds of ops that ours ran, and the digest of what came of it; the
    reader clears them.
    """

    def __init__(self, config: AdaptraConfig | None) -> None:
        self.config = config
        self.calls: list[dict[str, str]] = []
        self._stock: dict[str, Function] = {name: getattr(schedules, name) for name in NAMES}
        self._ours = {name: self._before(function) for name, function in self._stock.items()}
        self._activation: Activation | None = None
        self._fetch: Function = schedules.get_forward_backward_func
        self._reasons: list[str] = []
        _put(self._ours)
        self._end_with_groups()
        self._listen()

    def _before(self, stock: Function) -> Function:
        @functools.wraps(stock)
        def schedule(**arguments: Any) -> Any:
            call = {"by": "Megatron", "why": "", "ops": "", "came": "an exception"}
            self.calls.append(call)
            with self._as_in_training():
                result = self._call(stock, arguments, call)
            call["came"] = _digest(result, arguments)
            return result

        return schedule

    def _call(self, stock: Function, arguments: dict[str, Any], call: dict[str, str]) -> Any:
        if self.config is None:
            return stock(**arguments)
        if not parallel_state.model_parallel_is_initialized():
            call["why"] = "no groups to activate with"
            return stock(**arguments)
        session = self._session(self.config)
        function = self._fetch()
        if function.__wrapped__ is not stock:  # not the one that Megatron takes for these groups
            function = functools.partial(_through, session, stock)
        before, self._reasons[:] = session.iteration, []
        try:
            return function(**arguments)
        finally:
            call["by"] = "us" if session.iteration > before else "Megatron"
            session.guard.flush(60.0)  # it prints the reasons
            call["why"] = "; ".join(self._reasons)
            ours = session.reports.records[-1].ops if call["by"] == "us" else ()
            call["ops"] = "".join(sorted({done.op.kind.value for done in ours}))

    def _session(self, config: AdaptraConfig) -> Session:
        if self._activation is None:
            fetch = schedules.get_forward_backward_func
            self._activation = activate(config)
            self._activation.session.reports.keep_records = range(1 << 30)
            self._fetch = schedules.get_forward_backward_func
            for target in PATCHES["schedule"].present():  # what the tests fetch is what they name
                owner, name = find(target)
                setattr(owner, name, fetch)
        session: Session = self._activation.session
        return session

    @contextlib.contextmanager
    def _as_in_training(self) -> Iterator[None]:
        """Inside a call Megatron's names mean its own functions: the plugin looks at them."""
        _put(self._stock)
        try:
            yield
        finally:
            _put(self._ours)

    def _end_with_groups(self) -> None:
        end = parallel_state.destroy_model_parallel

        @functools.wraps(end)
        def destroy_model_parallel() -> None:
            activation, self._activation = self._activation, None
            if activation is not None:
                activation.undo()
            end()

        parallel_state.destroy_model_parallel = destroy_model_parallel

    def _listen(self) -> None:
        """Why the plugin leaves a call to Megatron: rank 0 prints it, once; all have the reason."""
        line = LogOnce.line

        def listened(notices: LogOnce, text: str, *more: str, **how: Any) -> None:
            self._reasons.append(text)
            line(notices, text, *more, **how)

        LogOnce.line = listened  # type: ignore[method-assign]


def _through(session: Session, stock: Function, **arguments: Any) -> Any:
    return session.forward_backward(stock, arguments)


def _put(functions: Mapping[str, Function]) -> None:
    for name, function in functions.items():
        setattr(schedules, name, function)


def _digest(result: Any, arguments: dict[str, Any]) -> str:
    """Of what the schedule returned (losses) and of the gradients that it left, to the last bit."""
    found = hashlib.sha256()
    _add(found, result)
    for model in models_of(arguments):
        for parameter in model.parameters():
            _add(found, getattr(parameter, "main_grad", None))
            _add(found, parameter.grad)
    return found.hexdigest()[:16]


def _add(found: Any, value: Any) -> None:
    if isinstance(value, dict):
        value = [part for key in sorted(value) for part in (key, value[key])]
    if isinstance(value, (list, tuple)):
        found.update(f"{len(value)} of ".encode())
        for part in value:
            _add(found, part)
    elif isinstance(value, torch.Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    else:
        found.update(repr(value).encode())
