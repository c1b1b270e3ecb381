"""Patches of an iteration's end, made once Megatron has its model and its optimizer."""

from __future__ import annotations

import contextlib
from typing import Any

from megatron_adaptra.adapter.pipeline.session import Session
from megatron_adaptra.adapter.step import tied_embedding
from megatron_adaptra.adapter.step.reruns import Reruns
from megatron_adaptra.adapter.step.step_result import StepResultSync


def attach(session: Session, built: Any) -> contextlib.ExitStack:
    """Patch what a step waits for; `built`: by Megatron's `setup_model_and_optimizer`.

    A collective. To close the returned stack undoes the patches.
    """
    from megatron.training import get_args, get_timers

    model, optimizer, scheduler = built[:3]
    args, patches = get_args(), session.patches
    with contextlib.ExitStack() as stack:
        if optimizer is None:
            return stack
        if patches.uses("step-result"):
            session.step_result = StepResultSync(optimizer, scheduler, session)
            stack.enter_context(session.step_result.patched())
        if args.clip_grad > 0 and patches.uses("small-collectives"):
            embedding = tied_embedding.defer_hook(args, session, model, optimizer)
            if embedding is not None:
                session.defer_hooks.append(embedding)
        if patches.uses("reruns"):
            session.reruns = Reruns(get_timers(), session.context.say)
            session.defer_hooks.append(session.reruns.defer)
            stack.enter_context(session.reruns.patched())
        return stack.pop_all()
