"""`--adaptra-dry-run`: a printed account of what the plugin would do in this job."""

from __future__ import annotations

import os
from typing import Any

from megatron_adaptra.adapter.compat.patches import PATCHES, Job, Lasts, Resolved, resolve
from megatron_adaptra.adapter.compat.profiles import (
    NEWEST,
    installed_version,
    is_known,
    profile,
    verify,
)
from megatron_adaptra.base.errors import BadInput, UnsupportedMegatron
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.plan import evaluate
from megatron_adaptra.plan.pipeline.initial import starting_schedule
from megatron_adaptra.view.schedule_grid import ascii_schedule

WIDEST = 200  # columns of a drawing that people still read


def show(args: Any, job: Job) -> None:
    """Print the dry run of a `job`, at rank 0. `args`: Megatron's, validated."""
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(_lines(args, job)), flush=True)


def _lines(args: Any, job: Job) -> list[str]:
    config = job.config
    line = "a known line" if is_known() else f"newer than {NEWEST}, the newest known"
    out = [
        "adaptra: dry run, nothing is trained",
        f"  megatron-core    {installed_version()}, {line}",
    ]
    try:
        verify(profile())
        resolved = resolve(job)
    except UnsupportedMegatron as error:
        end = "the job would end here" if config.strict else "the job would train as stock Megatron"
        return [*out, f"  seams            do not match: {error}", f"  so               {end}"]
    out += ["  seams            match", f"  engine           {_engine(args, config)}"]
    out += [f"  {line}" for line in resolved.lines()]
    for lasts in Lasts:
        out += _patched(lasts, resolved)
    return out + _plan(args, config)


def _patched(lasts: Lasts, resolved: Resolved) -> list[str]:
    """Return lines on the patches that last as long as `lasts`: their targets, and why."""
    out = []
    for name, entry in PATCHES.items():
        if entry.lasts is lasts and resolved.uses(name):
            of = f" of {entry.of}" if entry.of else ""
            out += [f"    {target}{of}" for target in entry.present()]
            out.append(f"        {name}: {entry.why}")
    return [f"  patched {lasts.value}", *out] if out else []


def _engine(args: Any, config: AdaptraConfig) -> str:
    if args.pipeline_model_parallel_size == 1:
        return "none: there is one stage, so there are no links"
    if config.observes:
        return "none: Megatron's own schedule and messages are measured"
    if config.engine == "executor" and not is_known():
        return "native: the executor is for known lines only"
    return config.engine


def _plan(args: Any, config: AdaptraConfig) -> list[str]:
    """Return lines on a healthy pipeline's plan: stages are equal, backwards take two forwards."""
    stages = args.pipeline_model_parallel_size
    count = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    out = [
        f"  shape            {stages} stages, {count} microbatches of {args.micro_batch_size}, "
        f"data parallel {args.data_parallel_size}, "
        f"tensor parallel {args.tensor_model_parallel_size}"
    ]
    if stages == 1:
        return out
    even = (1.0,) * stages
    chunks = args.virtual_pipeline_model_parallel_size or 1
    try:
        first = starting_schedule(
            config.policy, stages, count, chunks, config.budget.microbatches, config.recompute
        )
    except BadInput as error:
        return [*out, f"  plan at start    none, Megatron's own: {error}"]
    plan = evaluate(first, Conditions(count, even, even, even, chunks=chunks))
    depths = ",".join(map(str, first.warmup))
    then = "; deeper where a link gets slow" if config.policy == "adaptive" else ""
    budget = config.activation_budget
    limit = "no limit" if budget == "none" else f"the limit is {budget}"
    out += [
        f"  plan at start    {first.why}, warmup {depths}{then}",
        f"  in flight        at most {max(plan.peak_in_flight):g} microbatches a stage; {limit}",
    ]
    drawing = ascii_schedule(first).splitlines()
    if max(map(len, drawing)) <= WIDEST:
        out += ["", *(f"  {text}" for text in drawing)]
    if config.emulate_link:
        out += ["", f"  emulated links   {'; '.join(config.emulate_link)}"]
    if config.emulate_worker:
        out += ["", f"  emulated workers {'; '.join(config.emulate_worker)}"]
    return out
