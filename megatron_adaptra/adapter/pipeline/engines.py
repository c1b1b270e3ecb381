"""Engines of an iteration: Megatron as it is, its schedule over our messages, our executor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state as mpu

from megatron_adaptra.adapter.baseline import stock
from megatron_adaptra.adapter.baseline.stock import EmulatedSends
from megatron_adaptra.adapter.baseline.trace import (
    timed_messages,
    traced_ops,
    watched_messages,
)
from megatron_adaptra.adapter.compat.schedule_args import (
    ScheduleArgs,
    config_of,
    default_groups,
    models_of,
)
from megatron_adaptra.adapter.limits import (
    EXECUTOR,
    MOVED,
    RECOMPUTE,
    SPLIT,
    Case,
    no_states,
    why_not,
)
from megatron_adaptra.adapter.pipeline.byte_counts import ByteCounts
from megatron_adaptra.adapter.pipeline.executor_stage import MegatronStage
from megatron_adaptra.adapter.pipeline.home_data import IterationData
from megatron_adaptra.adapter.pipeline.home_random import HomeRandom
from megatron_adaptra.adapter.pipeline.native import AdaptraCommunicator
from megatron_adaptra.adapter.pipeline.native_chunks import ChunkCommunicator, overlapping
from megatron_adaptra.adapter.pipeline.run import Run
from megatron_adaptra.adapter.pipeline.split import SplitBackward, filling_order
from megatron_adaptra.adapter.pipeline.wiring import RankContext
from megatron_adaptra.config import SPLITTING
from megatron_adaptra.ir.op import Kind


def run_megatron(context: RankContext, function: Any, arguments: ScheduleArgs) -> Any:
    """Run Megatron's own schedule `function`, kept from freeing what it is still sending."""
    config, patches = config_of(arguments), context.patches
    protects = not patches.why_not("whole-outputs")
    with contextlib.ExitStack() as stack:
        if patches.uses("waited-messages"):
            stack.enter_context(watched_messages(context.watchdog, raises=False))
        if protects and stock.frees_too_early(function, config, context.profile.waits):
            context.say(
                "WARNING: before megatron-core 0.18 interleaved schedules with overlapped messages "
                "send garbage over gloo; they run without the overlap: pass "
                "--no-overlap-p2p-communication to have it so without adaptra"
            )
            stack.enter_context(stock.without_overlap(config, context.stages))
        return function(**arguments)


def run_stock(
    context: RankContext,
    sends: EmulatedSends | None,
    iteration: int,
    function: Any,
    arguments: ScheduleArgs,
) -> Any:
    """Run Megatron's own schedule `function`, with links and ops as slow as ours, where emulated.

    `sends`: of this job, None where no link is. `iteration`: which the emulation's rules name.
    """
    with _slow(context, sends, iteration) as stack:
        if context.worker_emulator is not None and context.worker_emulator.rules:
            stack.enter_context(stock.slowed_ops(context.worker_emulator))
        return run_megatron(context, function, arguments)


def run_measured(
    context: RankContext,
    sends: EmulatedSends | None,
    iteration: int,
    run: Run,
    function: Any,
    arguments: ScheduleArgs,
) -> Any:
    """Run Megatron's own schedule `function` over its own messages, and measure when ops run.

    `sends`, `iteration`: see `run_stock`. The probe makes ops slow, where that is emulated.
    """
    probe = context.probe
    with (
        _slow(context, sends, iteration),
        timed_messages(probe),
        traced_ops(probe, run.line, probe.spoilt),
    ):
        return run_megatron(context, function, arguments)


def _slow(
    context: RankContext, sends: EmulatedSends | None, iteration: int
) -> contextlib.ExitStack:
    """Make emulated links slow for Megatron's own messages, in a `with` over what is returned."""
    with contextlib.ExitStack() as stack:
        if sends is not None and not context.patches.why_not("emulated-sends"):
            stack.enter_context(sends.slow(iteration))
        return stack.pop_all()


def run_native(context: RankContext, run: Run, function: Any, arguments: ScheduleArgs) -> Any:
    """Run Megatron's own schedule `function` over our messages, with the plan's warmup."""
    line, mailbox, profile = run.line, run.wiring.mailbox, context.profile
    group, config = mpu.get_pipeline_model_parallel_group(), config_of(arguments)
    chunks = len(models_of(arguments))
    arguments = {**arguments, profile.groups: groups_of(context, arguments)}
    if chunks == 1:
        data = arguments["data_iterator"]
        begins = data.at if isinstance(data, IterationData) else None
        arguments["p2p_communicator"] = AdaptraCommunicator(
            group, config, profile, line, mailbox, begins
        )
        return function(**arguments)
    interleaved = ChunkCommunicator(group, config, chunks, line, mailbox)
    arguments["p2p_communicator"] = interleaved
    with traced_ops(context.probe, line), overlapping(config):
        result = function(**arguments)
    interleaved.finish()
    return result


class Executor:
    """An executor runs iterations op by op, and keeps what outlives one of them.

    `counts`: when activations are measured.
    """

    def __init__(self, context: RankContext, counts: ByteCounts) -> None:
        self._context, self._counts = context, counts
        self._splits: list[SplitBackward] = []  # by chunk, once a plan has halves of backwards
        self._order: dict[torch.nn.Parameter, None] = {}  # in which Megatron fills gradients
        self._random = HomeRandom()

    def limits(self, case: Case) -> dict[str, str]:
        """Return why not, by feature that the job of a `case` asks this loop for; "" if it can."""
        if not self.plans(case.arguments):
            return {}
        asked = [SPLIT] if case.ours.policy in ("adaptive", *SPLITTING) else []
        asked += [RECOMPUTE] if case.ours.recompute or case.ours.observes else []
        moves = case.ours.reroute == "auto" and self._context.replicas > 1
        asked += [MOVED] if moves else []
        return {feature: why_not(feature, case) for feature in asked}

    @contextlib.contextmanager
    def learning(self, arguments: ScheduleArgs) -> Iterator[None]:
        """Record the order of gradients in an iteration of Megatron's own, for later ones."""
        if self._context.config.engine != "executor":
            yield
            return
        with filling_order(models_of(arguments)) as self._order:
            yield

    def runs(self, arguments: ScheduleArgs) -> bool:
        """Return whether the executor is wanted and can run this call of Megatron's schedule."""
        config = self._context.config
        if config.engine != "executor":
            return False
        if reason := why_not(EXECUTOR, Case(config, arguments)):
            self._context.say(f"native engine: the executor does not support {reason}")
        return not reason

    def plans(self, arguments: ScheduleArgs) -> bool:
        """Return whether plans may be the executor's: it runs this call, or could."""
        config = self._context.config
        if config.observes:
            return not why_not(EXECUTOR, Case(config, arguments))
        return self.runs(arguments)

    def run(self, run: Run, arguments: ScheduleArgs, iteration: int) -> Any:
        """Run one iteration; where ByteCounts asks for it, bytes of activations are counted.

        `iteration`: how many went before, those that Megatron has run again included.
        """
        context, line, models = self._context, run.line, models_of(arguments)
        halves = any(op.kind is Kind.I for op in line)
        if halves and not self._splits:
            self._splits = [SplitBackward(model, self._order) for model in models]
        count_bytes = self._counts.due(run.program)
        self._random.begin(iteration)
        drawn = self._random if run.by_home and not no_states() else None
        stage = MegatronStage(
            line, run.wiring.mailbox, arguments, groups_of(context, arguments),
            context.guard, self._splits if halves else (), count_bytes, drawn,
        )  # fmt: skip
        return stage.run()


def groups_of(context: RankContext, arguments: ScheduleArgs) -> Any:
    """Return the caller's process groups, or those that Megatron's schedule would use."""
    return arguments.get(context.profile.groups) or default_groups()
