"""One rank's plugin in a running Megatron: from the first training iteration to the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state as mpu

from megatron_adaptra.adapter.baseline.stock import EmulatedSends
from megatron_adaptra.adapter.baseline.trace import counted_forwards
from megatron_adaptra.adapter.compat import closed_groups
from megatron_adaptra.adapter.compat.patches import Resolved
from megatron_adaptra.adapter.compat.profiles import Profile
from megatron_adaptra.adapter.compat.schedule_args import (
    ScheduleArgs,
    config_of,
    message_of,
    models_of,
    only,
)
from megatron_adaptra.adapter.limits import (
    MOVED,
    PIPELINE,
    ROUTES,
    WARMUP,
    Case,
    why_not,
)
from megatron_adaptra.adapter.pipeline import home_random
from megatron_adaptra.adapter.pipeline.byte_counts import ByteCounts
from megatron_adaptra.adapter.pipeline.counted_batches import CountedBatches, counted, timed
from megatron_adaptra.adapter.pipeline.emulation import emulated_links
from megatron_adaptra.adapter.pipeline.engines import (
    Executor,
    run_measured,
    run_native,
    run_stock,
)
from megatron_adaptra.adapter.pipeline.hangs import watch_hangs
from megatron_adaptra.adapter.pipeline.home_data import HomeData, unreadable
from megatron_adaptra.adapter.pipeline.op_watch import OpWatch
from megatron_adaptra.adapter.pipeline.rehearsal import Rehearsal
from megatron_adaptra.adapter.pipeline.reports import Reports, layers_of
from megatron_adaptra.adapter.pipeline.run import Run
from megatron_adaptra.adapter.pipeline.run_setup import start_run
from megatron_adaptra.adapter.pipeline.wiring import RankContext, Wiring, open_wiring
from megatron_adaptra.adapter.step.idle_losses import IdleLosses
from megatron_adaptra.adapter.step.reruns import Reruns
from megatron_adaptra.adapter.step.step_result import StepResultSync
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import NoConnections
from megatron_adaptra.base.log import GOES_ON, log_line
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.device.base import HOST, Device
from megatron_adaptra.execute.hang_watch import HangWatch
from megatron_adaptra.execute.heap import FrozenHeap
from megatron_adaptra.execute.small.small_collectives import DeferHook, SmallCollectives


class Session:
    """A session stands in for Megatron's forward_backward, from when Megatron's groups exist.

    Args:
        config: the job's settings, less those of features that are missing.
        profile: what differs between releases of Megatron.
        patches: what this job may patch; nothing if None.
        device: what runs the ops.
        own_loop: a user's own training loop calls us, not Megatron's program.

    Raises:
        BadInput: a rule of `--adaptra-emulate-link` or `--adaptra-emulate-worker` cannot be used.

    `run` is None until the first training iteration, which shows the number of microbatches and the
    size of a message; with several replicas until the second one, as the first runs as stock and is
    watched. Another run takes its place when that number changes. `iteration`: the one to come.
    `reports`: what was measured of them. `resumed`: the content of a checkpoint's file, see Fits.
    `announce`: decisions are logged. `defer_hooks`: see SmallCollectives; `attach` sets them,
    `reruns` and `step_result`.
    """

    def __init__(
        self,
        config: AdaptraConfig,
        profile: Profile,
        patches: Resolved | None = None,
        device: Device = HOST,
        own_loop: bool = False,
    ) -> None:
        patches = Resolved() if patches is None else patches
        self.context = context = RankContext.create(config, profile, patches, device)
        self.patches = patches
        self.config, self.watchdog, self.guard = context.config, context.watchdog, context.guard
        self.stage, self.stages, self.ranks = context.stage, context.stages, context.ranks
        self.run: Run | None = None
        self.iteration = 0
        self.reports = Reports(context)
        self.resumed: Any = None
        self.announce = False
        self.defer_hooks: list[DeferHook] = []
        self.reruns: Reruns | None = None
        self.step_result: StepResultSync | None = None
        self._sends: EmulatedSends | None = None  # of Megatron's own schedule
        links = emulated_links(config, self.stage, self.stages, context.replicas > 1)
        if links is not None and device.behind:
            context.say("emulated links are slow for our messages, not for Megatron's own on GPUs")
        elif links is not None:
            self._sends = EmulatedSends(links, context.workers)
        self._counts = ByteCounts(context)
        self._executor = Executor(context, self._counts)
        self._rehearsal = Rehearsal(context, device.behind and patches.uses("rehearsal"))
        self._homes = HomeData(context.replica) if context.replicas > 1 else None
        self._watch: OpWatch | None = None  # of ops, where there are other replicas
        if patches.uses("watched-ops"):
            own = closed_groups.at_my_stage()
            self._watch = OpWatch(own, own)
        self._batches: CountedBatches | None = None  # of the first iteration, while it is watched
        self._idle = IdleLosses(mpu.get_data_parallel_group())
        self._heap = self.guard.call(FrozenHeap)
        self._stock = ""  # why Megatron runs the pipeline from now on
        self._steps = False  # an iteration's step is still to come, or under way
        self._anew = False  # the next iteration begins a new run
        self._apart = False  # replicas that are planned together are not, for now
        # True where numbers of microbatches may change in one replica alone.
        self._counts_differ = own_loop and mpu.get_data_parallel_world_size() > 1
        self._noted = False  # that they have
        self._hangs = self.guard.call(watch_hangs, context)

    def forward_backward(self, function: Any, arguments: ScheduleArgs) -> Any:
        """Run one call of Megatron's forward_backward, in our order if the pipeline is ours.

        Args:
            function: Megatron's own, which runs what is not ours.
            arguments: its keyword arguments.

        Returns:
            The result of Megatron's function.

        Raises:
            PeerLost: a message of another stage did not come while Megatron would wait for it.
            Disagreement: the leader's decision on a plan did not come by then.
        """
        evaluates = arguments.get("forward_only")
        if evaluates:
            self.iteration_done()
        phase = f"an evaluation before iteration {self.iteration + 1}" if evaluates else ""
        self.watchdog.begins(self.iteration, phase)
        if self._hangs is not None:
            arguments = counted_forwards(self.watchdog, arguments)
        case = Case(self.config, arguments, function, self.patches)
        reason = self._stock or why_not(PIPELINE, case)
        if reason:
            self.context.say(f"stock schedule: {reason}")
        if self.context.emulator is not None:
            self.context.emulator.iteration = self.iteration
        if self.context.worker_emulator is not None:
            self.context.worker_emulator.iteration = self.iteration
        if reason or self.config.engine == "stock":
            return self._run_stock(function, arguments)
        self.iteration_done()
        if self.run is None and self._watched_first(arguments):
            return self._run_watched(function, arguments)
        if (collectives := self.small_collectives) is not None:
            collectives.in_step = True
        if self._apart:
            return self._run_apart(function, arguments)
        if self._counts_differ and not self._anew and self._other_count(arguments):
            return self._run_stock(function, arguments)
        run = self._run_for(arguments)
        if run is None:
            return self._run_stock(function, arguments)
        arguments = self.guard.call(timed, arguments, self.context.probe) or arguments
        data, homes, limits = None, self._homes, run.wiring.plan_group.limits
        if ROUTES in limits or run.stock:
            homes = None
        if homes is not None:
            data = homes.begin(only(arguments["data_iterator"]), run.microbatches)
            arguments = {**arguments, "data_iterator": data}
        probe = self.context.probe
        if self.context.device.behind:  # while all is well, nothing of the iteration's end is ours
            run.wiring.small_collectives.active = not run.stock
        probe.begin(self.iteration, run.stock)
        if run.wiring.probes is not None:
            self.guard.later(run.probe_links, True)
        with self._watching(arguments), self._rehearsal.around(run, arguments, self.iteration):
            if not run.stock and self._executor.runs(arguments):
                result = self._executor.run(run, arguments, self.iteration)
            else:
                with self._counts.around(run.program, arguments):
                    if run.stock:
                        result = run_measured(
                            self.context, self._sends, self.iteration, run, function, arguments
                        )
                    else:
                        result = run_native(self.context, run, function, arguments)
        met = ""
        if self._watch is not None and self._watch.met and WARMUP not in limits:
            met = self._watch.met.why
            self.context.say(f"no order of ops but that of the start from now on: {met}")
        if data is not None:
            data.end()
        if self.stage == self.stages - 1 and run.idle:
            result = self._idle.filled(result)
        run.wiring.mailbox.finish()
        self.watchdog.begins(self.iteration)  # its step
        if run.wiring.probes is not None:  # once more: one of them may wait for a core
            self.guard.later(run.probe_links, False)
        record = probe.pipeline_ends()
        self._steps = True
        if record is not None:
            self.guard.call(self.reports.add, run, record, met)
        if self._heap is not None:
            self.guard.call(self._heap.iteration_done)
        self.guard.later(self.reports.send)
        self.iteration += 1
        # Now, not at the next call: the word that a receive is posted takes as long as a message.
        run.begin(self.iteration, message_of(arguments))
        return result

    def _run_stock(self, function: Any, arguments: ScheduleArgs) -> Any:
        """Run a call by Megatron's own schedule, with emulated links and ops as slow as ours.

        A run that has begun its next iteration keeps that number: as many calls go before it.
        """
        result = run_stock(self.context, self._sends, self.iteration, function, arguments)
        self.watchdog.begins(self.iteration)  # its step
        begun = self.run is not None and not self.run.abandoned
        self.iteration += not begun and not arguments.get("forward_only")
        return result

    def _watched_first(self, arguments: ScheduleArgs) -> bool:
        """Return whether to watch the next iteration as stock: the first one of several replicas.

        A job that may not have the memory for it begins with its own order, the same in all
        replicas, and is watched in that.
        """
        config, watch = self.config, self._watch
        if watch is None or watch.watched:
            return False
        recomputes = config.recompute and config.policy != "adaptive"
        short = config.budget.microbatches < min(self.stages, arguments["num_microbatches"])
        return not (short or (recomputes and self._executor.runs(arguments)))

    def _run_watched(self, function: Any, arguments: ScheduleArgs) -> Any:
        """Run the first iteration of several replicas as stock, and see which ranks ops meet.

        Any other order may hang while that is not known.
        """
        if self._homes is not None:
            arguments, self._batches = counted(arguments)
        with self._watching(arguments), self._executor.learning(arguments):
            return self._run_stock(function, arguments)

    def _watching(self, arguments: ScheduleArgs) -> contextlib.AbstractContextManager[None]:
        """Watch, in a `with`, an iteration's ops, by these `arguments` of Megatron's schedule."""
        if self._watch is None:
            return contextlib.nullcontext()
        return self._watch.watching(config_of(arguments).finalize_model_grads_func)

    def _run_apart(self, function: Any, arguments: ScheduleArgs) -> Any:
        """Run an iteration that replicas share out as stock: they have no plan together."""
        if self.run is not None:
            self.run.abandon()
        if (collectives := self.small_collectives) is not None:
            collectives.take_spans()  # of no pipeline that is measured
        return self._run_stock(function, arguments)

    def _other_count(self, arguments: ScheduleArgs) -> bool:
        """Return whether a call has another number of microbatches than the run, which then waits.

        All ranks of the job begin a run together, and the other replicas may not have changed.
        """
        run = self.run
        if run is None or run.microbatches == arguments["num_microbatches"]:
            return False
        run.wiring.small_collectives.take_spans()  # of no pipeline that is measured
        if not self._noted:
            self._noted = True
            log_line(
                f"{self.watchdog.name(self.context.worker)}: stock schedule: iterations with "
                f"another number of microbatches than {run.microbatches}, as replicas may change "
                "it one by one in a loop of one's own"
            )
        return True

    def iteration_done(self) -> None:
        """End an iteration after its optimizer step: small collectives are torch's until the next.

        Without this call the start of an evaluation or of the next iteration ends it.
        """
        collectives = self.small_collectives
        if collectives is not None:
            collectives.in_step = False
        if collectives is not None and self._steps:
            self._steps = False
            self.context.probe.iteration_ends(collectives.take_spans())
            if self.context.device.behind:  # its ops are known by now
                self.guard.later(self.reports.send)

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Carry small collectives of Megatron's log, part of an iteration's end, in a `with`.

        Its barriers only line up its timers: no rank waits for a slow link there once results of
        steps are compared, which begins on all ranks in the same step.
        """
        collectives, result = self.small_collectives, self.step_result
        if collectives is None:
            yield
            return
        collectives.in_step = True
        collectives.barriers = result is None or not result.compared
        try:
            yield
            if result is not None:
                result.logged()
        finally:
            collectives.barriers, collectives.in_step = True, False

    def begin_anew(self, apart: bool = False) -> None:
        """Begin a new run with the next iteration, on all ranks: replicas share it out anew.

        Runs begin together, also where a replica's own number of microbatches stays as it is.
        `apart`: replicas run different numbers, so that those with one plan have none meanwhile.
        """
        self._anew, self._apart = True, apart and self.context.replicas > 1

    @property
    def small_collectives(self) -> SmallCollectives | None:
        """The small collectives of the iteration's end; None before the first iteration."""
        return None if self.run is None else self.run.wiring.small_collectives

    def close(self) -> None:
        """End the run, if there is one: its threads, its connections, its patches."""
        run, self.run = self.run, None
        self.guard.call(self.context.job_log.end_here)
        self.step_result = None  # it has connections of the run's
        with contextlib.ExitStack() as stack:
            stack.callback(self.context.probe.close)
            if isinstance(self._hangs, HangWatch):
                stack.callback(self._hangs.close)
            if self._watch is not None:
                stack.callback(self._watch.close)
            if self._sends is not None:
                stack.callback(self._sends.close)
            if self._heap is not None:
                stack.callback(self.guard.call, self._heap.close)
            stack.callback(self.guard.close, waits.END)
            stack.callback(self.guard.attempt, waits.END, self.context.job_log.close)
            stack.callback(self.guard.attempt, waits.END, self.context.failure_log.close)
            if run is not None:
                stack.callback(run.close)

    def _run_for(self, arguments: ScheduleArgs) -> Run | None:
        """Return the run for this number of microbatches; None where all is stock from now on.

        Megatron changes the number while a batch size ramps up, on all ranks in one iteration.
        """
        before, self.run = self.run, None
        if before is not None and (why := self._rehearsal.settle(before)):
            self._leave(before, why)
            return None
        anew, self._anew = self._anew, False
        same = before is not None and before.microbatches == arguments["num_microbatches"]
        if before is not None and same and not anew:
            self.run = before
            return before
        if before is not None:
            before.abandon()
        try:
            wiring = self._open(arguments) if before is None else before.wiring
        except NoConnections as error:  # on all ranks
            self._stock = str(error)
            return None
        with contextlib.ExitStack() as unless_started:
            unless_started.callback(wiring.close)
            self.run, self._stock = self._start(wiring, arguments, resumes=before is None)
            if self.run is not None:
                unless_started.pop_all()
        return self.run

    def _open(self, arguments: ScheduleArgs) -> Wiring:
        watch, context = self._watch, self.context
        self.reports.layers = self.guard.call(layers_of, arguments) or ""
        case = Case(self.config, arguments, patches=self.patches)
        limits = {WARMUP: why_not(WARMUP, case), **self._executor.limits(case)}
        if self._homes is not None:
            why = self._batches.why_not() if self._batches is not None else ""
            why = why or unreadable(only(arguments["data_iterator"]))
            limits = {MOVED: "", **limits, ROUTES: home_random.differing() or why}
        ties = closed_groups.configured(config_of(arguments), models_of(arguments))
        if watch is not None and watch.met is not None:
            ties.append(watch.met)
        wiring = open_wiring(context, arguments, self.resumed, limits, self.defer_hooks, ties)
        if watch is not None:
            watch.close()
            waited = None if context.device.behind else context.probe.waited
            own, group = closed_groups.at_my_stage(), wiring.plan_group
            alike = group.alike if group.joined else own
            watched, self._watch = watch.watched, OpWatch(alike, own, waited)
            self._watch.watched = watched
        return wiring

    def _start(
        self, wiring: Wiring, arguments: ScheduleArgs, resumes: bool
    ) -> tuple[Run | None, str]:
        return start_run(
            self.context, wiring, arguments, iteration=self.iteration,
            stock_until=self._rehearsal.stock_until(self.iteration),
            executes=self._executor.plans(arguments), announce=self.announce,
            # Replicas begin alike: each one's plan may be another.
            resumes=resumes and (self._watch is None or self._watch.watched),
            watch=self._watch,
        )  # fmt: skip

    def _leave(self, run: Run, why: str) -> None:
        """End the `run` for good, because of `why`, as all ranks do: Megatron goes on as stock."""
        self._stock = why
        self.context.say(f"stock schedule: {why}")
        self.reports.clear()
        self.guard.flush(waits.END)  # it has work with what is closed now
        try:
            run.close()
        except Exception as error:
            log_line(f"while connections were closed, {GOES_ON}: {error!r}")
