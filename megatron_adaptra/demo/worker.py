"""One rank of the demo: both arms, iteration by iteration, in one process.

The arms take turns, and change who goes first, so that both see the same machine. A turn begins
with a barrier; nothing is added to the iterations. Where the network itself is slow a turn has
several iterations: ranks leave a barrier, and an iteration, at different times there.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_adaptra.adapt.leader import Leader, planner_of
from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.adapter.compat.profiles import profile
from megatron_adaptra.base.errors import AdaptraError, PeerLost
from megatron_adaptra.base.log import log_line
from megatron_adaptra.base.processes import die_with_parent
from megatron_adaptra.config import AdaptraConfig, load_yaml
from megatron_adaptra.demo.comparison import Outlook
from megatron_adaptra.demo.cpu_load import Sample, kernel
from megatron_adaptra.demo.options import LAUNCHED, PROGRESS, DemoOptions
from megatron_adaptra.demo.results import RankResult, Run, write
from megatron_adaptra.demo.slow import MIN_GAIN
from megatron_adaptra.demo.stopping import asked_by, pass_on
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.launch.failures import recorded
from megatron_adaptra.measure.host_use import MachineTime
from megatron_adaptra.view.findings import key_phase

TURN = 5  # iterations of one arm in a row over a network that is slow by itself
KEPT = 8  # iterations whose records are kept, to draw one of them


def main(options: DemoOptions) -> int:
    """Run this rank to the end; rank 0 leaves the results in `options.out`.

    Raises AdaptraError if another number of ranks was started than the options need.
    """
    profile()  # an unsupported megatron-core ends here, before anything is set up
    import torch

    if not torch.cuda.is_available():
        from megatron_adaptra.adapter.baseline import cpu

        cpu.install()
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=max(300.0, options.timeout)))
    if dist.get_world_size() != options.world:
        raise AdaptraError(
            f"{dist.get_world_size()} ranks were started, {options.stages} stages with data "
            f"parallel {options.data_parallel} need {options.world}"
        )
    demo = _Demo(options)
    try:
        demo.run()
    except (PeerLost, RuntimeError) as error:
        if not (words := demo.session.watchdog.failure_message(error)):
            raise
        _end(words)
    dist.barrier()
    if demo.rank == 0 and not options.data:
        shutil.rmtree(demo.data, ignore_errors=True)
    demo.activation.undo()
    dist.destroy_process_group()
    return 0


def _end(text: str) -> None:
    """End the process at once, even while a thread is blocked inside a library."""
    log_line(text)
    os._exit(1)


def _decided(loop: Loop[Any] | None) -> list[Any]:
    """Return the decisions of the `loop` that came into force, at the end of a run."""
    if loop is None:
        return []
    loop.drain()
    return list(loop.log.in_force)


class _Demo:
    def __init__(self, options: DemoOptions) -> None:
        import torch.distributed as dist

        from megatron_adaptra.adapter.baseline import gpt
        from megatron_adaptra.adapter.baseline.stock import EmulatedSends
        from megatron_adaptra.adapter.entry.activate import activate
        from megatron_adaptra.adapter.pipeline.emulation import emulated_links
        from megatron_adaptra.plan.pipeline.initial import starting_schedule

        self.options, self.gpt, self.dist = options, gpt, dist
        self.rank = dist.get_rank()
        self.out = Path(options.out)
        self.shape = gpt.GPTShape(
            stages=options.stages,
            chunks=options.chunks,
            microbatches=options.microbatches,
            layers=options.num_layers,
            hidden=options.hidden_size,
            seq_length=options.seq_length,
            dropout=options.dropout or 0.0,
            precision=options.precision,
            seed=options.seed,
        )
        text = Path(options.text) if options.text else None
        self.data = options.data  # new: Megatron's index cache knows texts by path only
        if self.rank == 0:
            self.data = self.data or tempfile.mkdtemp(prefix="data-", dir=self.out)
            gpt.write_dataset(text, Path(self.data))
        shared = [self.data]
        dist.broadcast_object_list(shared)
        self.data = shared[0]
        gpt.initialize(self.shape, options.timeout)
        self.barrier_group = dist.new_group(backend="gloo")
        samples = options.iterations * options.microbatches * options.data_parallel
        dataset = gpt.build_dataset(Path(self.data) / "text", self.shape, samples)
        self.arms = {name: gpt.Arm.build(self.shape, dataset) for name in ("stock", "adaptra")}
        self.stock = gpt.forward_backward_function()
        settings = load_yaml(Path(options.config)) if options.config else {}
        if options.sync != "full":
            settings = {"sync": options.sync, **settings}
        if options.lateness:  # found and answered, unless the file has it otherwise
            settings = {"allreduce": options.allreduce, "min_gain": MIN_GAIN, **settings}
        config = replace(
            AdaptraConfig.from_mapping(settings, options.config),
            engine=options.engine,
            policy=options.policy,
            reroute=options.reroute,
            recompute=options.recompute,
            emulate_link=options.rules,
            emulate_worker=options.worker_rules,
            timeout=options.timeout,
            decision_log=str(self.out / "decisions.jsonl"),
            record=str(self.out),
        )
        self.iteration = 0  # the one under way
        if (seconds := options.lateness.get(self.gpt.data_parallel_rank())) is not None:
            for arm in self.arms.values():
                finalize = arm.config.finalize_model_grads_func
                arm.config.finalize_model_grads_func = self._late(seconds, finalize)
        if options.activation_budget:
            config = replace(config, activation_budget=options.activation_budget)
        self.activation = activate(config, demo=True)
        self.session = self.activation.session
        for reduction in self.activation.reductions:
            reduction.announce = False
        self.session.watchdog.end_on_signal()
        self.adapted = gpt.forward_backward_function()
        stock = starting_schedule(
            "adaptive", options.stages, options.microbatches, options.chunks, math.inf, False
        )
        context = self.session.context
        self.worker = context.worker
        self.stock_line = stock.replicated(context.replicas).order[self.worker]
        self.sends: EmulatedSends | None = None  # of the stock arm
        links = emulated_links(config, self.session.stage, options.stages)
        if links is not None:
            self.sends = EmulatedSends(links, self.session.ranks)
            self.activation.undo_with(self.sends.close)
        # One of the last iterations of this phase will be drawn.
        phases = options.phases
        self.end_of_phase = phases[key_phase(phases)][1]
        self.session.reports.keep_records = range(1, self.end_of_phase)
        self.start: Schedule | None = None  # rank 0: the run begins with it
        self.at_end: Outlook | None = None  # rank 0: as measured at the end of that phase
        self.interrupted = ""  # the name of the signal that ended the run
        self.samples: list[Sample] = []
        self.decisions: list[PlanDecision] = []  # rank 0: those that came into force
        self.stock_records: deque[Any] = deque(maxlen=KEPT)
        self.seconds: dict[str, list[float]] = {name: [] for name in self.arms}
        self.losses: dict[str, list[Any]] = {name: [] for name in self.arms}

    def _late(self, seconds: float, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an arm's `finalize` of gradients, which are ready and wait before it for `seconds`.

        They do so in the iterations that the options name, in stock Megatron's arm and ours alike.
        """
        iterations = range(self.options.slowness.first, self.options.slowness.end)

        def late(*args: Any, **kwargs: Any) -> Any:
            if self.iteration in iterations:
                time.sleep(seconds)
            return finalize(*args, **kwargs)

        return late

    def run(self) -> None:
        gc.collect()
        gc.freeze()  # what start-up made stays: collections during iterations get short
        options = self.options
        # Where it shows how long an iteration is, those of the other arm are not in between.
        alone = options.emulate and not options.netlab and not options.slowness.late_ranks
        alone = alone and options.sync == "full"
        turn = 1 if alone else TURN
        data = Path(self.options.data) if self.options.data else None
        starts = sorted({*range(0, options.iterations, turn), *options.lab_changes})
        for number, (first, end) in enumerate(pairwise((*starts, options.iterations))):
            order = ("stock", "adaptra") if number % 2 == 0 else ("adaptra", "stock")
            iterations = range(first, end)
            if data is not None and self.rank == 0:
                pass_on(data)
            self._barrier(f"the barrier before iteration {first + 1} of {order[0]}")
            self._sample(first)
            if data is not None and (signal := asked_by(data)):
                self.interrupted = signal
                break
            for name in order:
                if name != order[0]:
                    self._barrier(f"the barrier before iteration {first + 1} of {name}")
                for iteration in iterations:
                    self._iteration(name, iteration)
            for iteration in iterations:
                self._progress(iteration)
            self._look(iterations)
        self._finish()

    def _sample(self, iteration: int) -> None:
        machine = MachineTime.now() if self.rank == 0 else None
        self.samples.append(Sample(iteration, time.process_time(), machine))

    def _look(self, iterations: range) -> None:
        """Keep, on rank 0, the plan that the run begins with, and the end of the phase drawn."""
        leader = self._controller
        if self.rank != 0 or not isinstance(leader, Leader):
            return
        if self.start is None:
            self.start = leader.ballot.schedule
        # Where replicas share out microbatches, no plan of one pipeline is compared.
        if self.end_of_phase - 1 in iterations and self.options.sync == "full":
            leader.loop.drain()
            self.at_end = Outlook.now(leader)

    def _barrier(self, phase: str) -> None:
        """Wait for all ranks. Rank 0, which knows who is missing, gives up first and says so.

        It may have waited in vain for a message before it came here, and then it waits here.
        """
        watchdog, timeout = self.session.watchdog, self.options.timeout
        watchdog.phase = phase
        limit = timedelta(seconds=timeout if self.rank == 0 else 3 * timeout)
        try:
            self.dist.monitored_barrier(self.barrier_group, limit, wait_all_ranks=True)
        except RuntimeError as error:
            missing = re.search(r"Ranks? ([\d, ]+?) failed to pass", str(error))
            who = missing[1] if missing else "0"
            raise PeerLost(watchdog.describe(f": no word from rank {who}")) from error

    def _iteration(self, name: str, iteration: int) -> None:
        arm, watchdog = self.arms[name], self.session.watchdog
        watchdog.phase = f"iteration {iteration + 1} of {name}, outside the pipeline's messages"
        if self.session.small_collectives is not None:
            self.session.small_collectives.active = name == "adaptra"
        for reduction in self.activation.reductions:
            reduction.active = name == "adaptra"
        self.iteration = iteration
        begin = time.perf_counter()
        arm.begin()
        if name == "stock":
            with self._stock(iteration) as probe:
                losses = arm.forward_backward(self.stock)
                arm.optimizer.step()
                if probe is not None:
                    probe.pipeline_ends()
                    probe.iteration_ends()
                    self.stock_records.append(probe.record)
        else:
            losses = arm.forward_backward(self.adapted)
            arm.optimizer.step()
            self.session.iteration_done()
        self.seconds[name].append(time.perf_counter() - begin)
        arm.end()
        if name == "adaptra":
            self._note_decision()
            del self.session.reports.records[:-KEPT]
        self.losses[name].append(losses)

    @property
    def _controller(self) -> Any:
        """This rank's controller; None in the first iteration of several replicas, run as stock."""
        return None if self.session.run is None else self.session.run.controller

    def _note_decision(self) -> None:
        remedy = planner_of(self._controller)
        last = None if remedy is None else remedy.log.last
        if last is not None and last not in self.decisions[-1:]:
            self.decisions.append(last)

    @contextlib.contextmanager
    def _stock(self, iteration: int) -> Iterator[Any]:
        """Run a block as stock Megatron, and trace its ops in iterations that may be drawn."""
        from megatron_adaptra.adapter.baseline.stock import slowed_ops
        from megatron_adaptra.adapter.baseline.trace import traced_ops, watched_messages
        from megatron_adaptra.measure.probe import Probe

        worker = self.session.context.worker_emulator
        with contextlib.ExitStack() as stack:
            if self.sends is not None:
                stack.enter_context(self.sends.slow(iteration))
            if worker is not None:  # before ops are traced: what they wait is measured, too
                worker.iteration = iteration
                stack.enter_context(slowed_ops(worker))
            stack.enter_context(watched_messages(self.session.watchdog))
            probe = None
            if iteration in self.session.reports.keep_records:
                probe = Probe(self.worker)
                stack.callback(probe.close)
                probe.begin(iteration)
                stack.enter_context(traced_ops(probe, self.stock_line))
            yield probe

    def _progress(self, iteration: int) -> None:
        if self.rank == 0:
            controller = self._controller
            warmup = () if controller is None else controller.ballot.schedule.warmup
            last = {name: 1e3 * values[iteration] for name, values in self.seconds.items()}
            step = {"iteration": iteration, "ms": last, "warmup": warmup}
            if os.environ.get(LAUNCHED):
                print(PROGRESS + json.dumps(step), flush=True)
            elif iteration % 5 == 4:
                times = ", ".join(f"{name} {ms:.0f} ms" for name, ms in last.items())
                log_line(f"iteration {iteration + 1}: {times}, warmup {','.join(map(str, warmup))}")

    def _finish(self) -> None:
        """Bring everything to rank 0, which writes it down."""
        watchdog = self.session.watchdog
        watchdog.phase = "collecting the results"
        controller = self._controller
        if isinstance(controller, Leader):
            controller.loop.drain()
        self._note_decision()
        self._sample(len(self.seconds["adaptra"]))
        losses = {
            n: [self.gpt.mean_loss(step) for step in steps] for n, steps in self.losses.items()
        }
        loops = [loop for reduction in self.activation.reductions for loop in reduction.loops]
        mine = RankResult(
            stage=self.session.stage,
            seconds=self.seconds,
            digests={name: arm.digest() for name, arm in self.arms.items()},
            apart=self.arms["adaptra"].apart(self.arms["stock"]),
            records={"stock": list(self.stock_records), "adaptra": self.session.reports.records},
            counted=self.session.reports.counted,
            samples=self.samples,
            kernel=kernel(),
            reductions=[decision for loop in loops for decision in _decided(loop)],
        )
        gathered: list[Any] = [None] * self.dist.get_world_size()
        self.dist.all_gather_object(gathered, mine)
        if self.rank == 0 and isinstance(controller, Leader):
            assert self.start is not None
            at_end = self.at_end
            if at_end is None and self.options.sync == "full":
                at_end = Outlook.now(controller)
            shares = self.activation.shares
            run = Run(
                losses, self.decisions, self.start, at_end,
                self.session.context.workers, self.session.context.replicas, self.gpt.versions(),
                self.interrupted, _decided(None if shares is None else shares.loop),
            )  # fmt: skip
            write(self.options, gathered[: self.options.world], run, controller)


def run_rank(text: str) -> int:
    """Run one rank; `text`: the options, as `DemoOptions.dump` gives them. Returns its status."""
    die_with_parent()
    try:
        return main(DemoOptions.load(text))
    except AdaptraError as error:
        _end(str(error))
        return 1


if __name__ == "__main__":
    with recorded():
        sys.exit(run_rank(sys.argv[1]))
