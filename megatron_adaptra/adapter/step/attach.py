"""What the plugin does to an iteration's end, once Megatron has its model and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_adaptra.adapter.pipeline.session import Session
from megatron_adaptra.adapter.step import tied_embedding
from megatron_adaptra.adapter.step.reruns import Reruns
from megatron_adaptra.adapter.step.step_result import StepResultSync


def attach(session: Session, built: Any) -> Callable[[], None]:
    """`built`: by Megatron's `setup_model_and_optimizer`. Collective; returns the undoing."""
    from megatron.training import get_args, get_timers

    model, optimizer = built[:2]
    args, undo = get_args(), list[Callable[[], None]]()
    if session.config.small_collectives == "off" or optimizer is None:
        return _all(undo)
    session.step_result = StepResultSync(optimizer, session)
    undo.append(session.step_result.undo)
    if args.clip_grad > 0:
        embedding = tied_embedding.defer_hook(args, session, model, optimizer)
        if embedding is not None:
            session.defer_hooks.append(embedding)
        session.reruns = Reruns(get_timers())
        session.defer_hooks.append(session.reruns.defer)
        undo.append(session.reruns.undo)
    return _all(undo)


def _all(undo: list[Callable[[], None]]) -> Callable[[], None]:
    def back() -> None:
        while undo:
            undo.pop()()

    return back
