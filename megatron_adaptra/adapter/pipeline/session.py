"""One rank's plugin in a running Megatron: from the first training iteration to the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_adaptra.adapter.baseline import stock
from megatron_adaptra.adapter.baseline.trace import traced_ops
from megatron_adaptra.adapter.compat.compatibility import (
    RECOMPUTE,
    SPLIT,
    limits_of,
    not_ours,
    unsupported,
)
from megatron_adaptra.adapter.compat.profiles import Profile
from megatron_adaptra.adapter.compat.schedule_args import (
    config_of,
    default_groups,
    message_of,
    models_of,
)
from megatron_adaptra.adapter.pipeline import handlers
from megatron_adaptra.adapter.pipeline.native import AdaptraCommunicator
from megatron_adaptra.adapter.pipeline.native_chunks import ChunkCommunicator, overlapping
from megatron_adaptra.adapter.pipeline.plan_group import PlanGroup, gather, machine
from megatron_adaptra.adapter.pipeline.split import SplitBackward
from megatron_adaptra.adapter.step.reruns import Reruns
from megatron_adaptra.adapter.step.step_result import StepResultSync
from megatron_adaptra.config import SPLITTING, AdaptraConfig
from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.program import Program, lower
from megatron_adaptra.ir.schedule import Line, Schedule
from megatron_adaptra.ir.timeline import peak_in_flight
from megatron_adaptra.ir.unused_posts import first_posts, unused_posts
from megatron_adaptra.log import log_line
from megatron_adaptra.plan.initial import starting_schedule, trial
from megatron_adaptra.runtime.channel import Channel
from megatron_adaptra.runtime.collectives.small_collectives import Deferred, SmallCollectives
from megatron_adaptra.runtime.controller import Controller
from megatron_adaptra.runtime.decisions import DecisionLog
from megatron_adaptra.runtime.failure_log import SharedFailureLog
from megatron_adaptra.runtime.mailbox import Mailbox
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.runtime.watchdog import Watchdog
from megatron_adaptra.telemetry.estimate import Estimator
from megatron_adaptra.telemetry.probe import IterationRecord, Memory, Probe
from megatron_adaptra.transport.emulate import LinkEmulator
from megatron_adaptra.transport.scenario import load_rules
from megatron_adaptra.transport.torch_p2p import TorchTransport, open_lanes


class Session:
    """Stands in for Megatron's forward_backward function.

    Built when Megatron's groups exist; transports and controller are opened by the first training
    iteration, which tells the number of microbatches and the size of a message.
    """

    def __init__(self, config: AdaptraConfig, profile: Profile) -> None:
        self.config, self.profile = config, profile
        group = mpu.get_pipeline_model_parallel_group()
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.stage, self.stages = group.rank(), group.size()
        self.records: list[IterationRecord] = []
        self.keep_records: Container[int] = ()  # iterations whose records are kept, for timelines
        self.counted: list[tuple[int, Memory]] = []  # iterations whose bytes were counted
        self.iteration = 0
        self.resumed: dict[str, Any] | None = None  # the plan of a checkpoint, see state()
        self.announce = False  # say decisions aloud
        self.block: PlanGroup | None = None
        self.log = DecisionLog(None)
        rules = load_rules(config.emulate_link, self.stages)
        self.emulator = LinkEmulator(self.stage, rules) if rules else None
        self.failure_log = SharedFailureLog(machine())
        self.watchdog = Watchdog(self.stage, self.ranks, self.failure_log)
        self.probe = Probe(self.stage)
        self.controller: Controller | None = None
        self.mailbox: Mailbox | None = None
        self.small_collectives: SmallCollectives | None = None
        self.later: list[Deferred] = []  # see SmallCollectives.later
        self.reruns: Reruns | None = None
        self.verdicts: StepResultSync | None = None
        self._transports: list[TorchTransport] = []
        self._lowered: Schedule | None = None  # what the program is for
        self._program: Program | None = None
        self._splits: list[SplitBackward] = []  # by chunk, once a plan has halves of backwards
        self._measured: Program | None = None  # whose activations have been counted in bytes
        self._first = 0  # iteration of this process
        self._begun = False  # the iteration to come has its program, and first receives posted
        self._microbatches = 0
        self._told: set[str] = set()

    def forward_backward(self, function: Any, arguments: dict[str, Any]) -> Any:
        """One call of Megatron's forward_backward function, the `function` that we stand in for."""
        reason = not_ours(function, arguments, self.config.engine, self.stages)
        if reason:
            self._tell(f"stock schedule: {reason}")
            return self._hand_over(function, arguments)
        if self.config.engine == "stock":
            return self._run_stock(function, arguments)
        if self.mailbox is None:
            self._open(arguments)
        assert self.mailbox is not None
        self.iteration_done()
        if arguments["num_microbatches"] != self._microbatches:
            self._start(arguments)
        program = self._program if self._begun else self._begin(arguments)
        assert program is not None
        assert self.controller is not None
        self._begun = False
        if self.emulator is not None:
            self.emulator.iteration = self.iteration
        self.probe.begin(self.iteration)
        result = self._run(function, arguments, program)
        self.mailbox.finish()
        self.probe.pipeline_ends()
        record = self.probe.record
        self.controller.report(record)
        if self.iteration in self.keep_records:
            self.records.append(record)
        self.iteration += 1
        # Before the step: the word that a receive stands posted takes as long as a message.
        self._post_first(self._begin(arguments))
        return result

    def _begin(self, arguments: dict[str, Any]) -> Program:
        """The boundary between two iterations: the program of the one to come."""
        assert self.controller is not None
        assert self.mailbox is not None
        schedule = self.controller.begin(self.iteration)
        self.mailbox.begin(self.iteration, message_of(arguments))
        if self._program is None or self._lowered is not schedule:
            if (
                self.small_collectives is not None
                and self._program is not None
                and self.block is not None
            ):
                self.small_collectives.try_again(self.block.members)
            self._lowered, self._program = schedule, lower(schedule, self._ahead)
        self._begun = True
        return self._program

    def _post_first(self, program: Program) -> None:
        assert self.mailbox is not None
        for op in first_posts(program, self.stage):
            self.mailbox.post(op)

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Barriers of Megatron's log only line up its timers: nobody waits for a slow link there,
        as soon as all ranks know that nobody does."""
        if self.small_collectives is None or self.verdicts is None:
            yield
            return
        self.small_collectives.barriers = not self.verdicts.known
        try:
            yield
        finally:
            self.small_collectives.barriers = True

    def iteration_done(self) -> None:
        """The optimizer step is over. Without this call the next iteration's start counts."""
        if self.probe.record.ops and not self.probe.record.end:
            self.probe.iteration_ends(
                self.small_collectives.take_spans() if self.small_collectives is not None else ()
            )

    def close(self) -> None:
        if self.mailbox is not None:
            self.mailbox.close()
        if self.controller is not None:
            self.controller.close()
        if self.small_collectives is not None:
            self.small_collectives.undo()
            self.small_collectives = None
        for transport in self._transports:
            transport.close()
        self._transports = []

    def _run(self, function: Any, arguments: dict[str, Any], program: Program) -> Any:
        assert self.mailbox is not None
        line = program.order[self.stage]
        groups = arguments.get(self.profile.groups) or default_groups()
        if self._executes(arguments):
            return self._execute(line, arguments, groups)
        group, config = mpu.get_pipeline_model_parallel_group(), config_of(arguments)
        chunks = len(models_of(arguments))
        ours: dict[str, Any] = {self.profile.groups: groups}
        if chunks == 1:
            communicator = AdaptraCommunicator(group, config, self.profile, line, self.mailbox)
            return function(**{**arguments, **ours, "p2p_communicator": communicator})
        interleaved = ChunkCommunicator(group, config, chunks, line, self.mailbox)
        with traced_ops(self.probe, line), overlapping(config):
            result = function(**{**arguments, **ours, "p2p_communicator": interleaved})
        interleaved.finish()
        return result

    def _executes(self, arguments: dict[str, Any]) -> bool:
        """Whether our executor runs this call, and not Megatron's own schedule."""
        if self.config.engine != "executor":
            return False
        if reason := unsupported(arguments):
            self._tell(f"native engine: the executor does not support {reason}")
        return not reason

    def _execute(self, line: Line, arguments: dict[str, Any], groups: Any) -> Any:
        """The executor. A plan's first iteration allocates; in its second bytes are counted."""
        assert self.mailbox is not None
        models = models_of(arguments)
        halves = any(op.kind is Kind.I for op in line)
        if halves and not self._splits:
            self._splits = [SplitBackward(model) for model in models]
        fresh = self.iteration > self._first and self._measured is not self._program
        stage = handlers.MegatronStage(
            line, self.stage, self.stages, self.mailbox, arguments, groups,
            self._splits if halves else (), count_bytes=fresh,
        )  # fmt: skip
        result = stage.run()
        if fresh:
            self._measured = self._program
        memory = self.probe.record.memory = stage.meter.memory(len(models))
        if memory.per_microbatch:
            self.counted.append((self.iteration, memory))
        return result

    def _hand_over(self, function: Any, arguments: dict[str, Any]) -> Any:
        """Megatron's own schedule, kept from freeing what it is still sending."""
        config = config_of(arguments)
        if not stock.frees_too_early(function, config, self.profile.waits):
            return function(**arguments)
        self._tell(
            "WARNING: before megatron-core 0.18 interleaved schedules with overlapped messages "
            "send garbage over gloo; they run without the overlap: pass "
            "--no-overlap-p2p-communication to have it so without adaptra"
        )
        with stock.without_overlap(config, self.stages):
            return function(**arguments)

    def _run_stock(self, function: Any, arguments: dict[str, Any]) -> Any:
        """Megatron as it is, over links that are as slow as ours would be."""
        with contextlib.ExitStack() as stack:
            if self.emulator is not None:
                self.emulator.iteration = self.iteration
                stack.enter_context(stock.emulated_sends(self.emulator, self.ranks))
            result = self._hand_over(function, arguments)
        self.iteration += 1
        return result

    def _open(self, arguments: dict[str, Any]) -> None:
        """Connect to the neighbours and to the leader. Every rank is here."""
        device = torch.device(torch.cuda.current_device())
        several = len(models_of(arguments)) > 1
        neighbours = [link for s in range(self.stages - 1) for link in ((s, s + 1), (s + 1, s))]
        if several and self.stages > 2:
            neighbours += [(self.stages - 1, 0), (0, self.stages - 1)]
        kinds = ["pipeline", "gradients"] if several and self.stages == 2 else ["pipeline"]
        pipelines = []
        for kind in kinds:
            lanes = open_lanes(self.ranks, neighbours, kind)
            pipelines.append(TorchTransport(*lanes, self.emulator, device))
        limits = limits_of(arguments, self.config) if self._executes(arguments) else {}
        block = self.block = gather(self.resumed, limits)
        for what, reason in block.limits.items():
            self._tell(f"{what} is not possible: {reason}")
        self.failure_log.meet()
        star = [link for m in range(1, len(block.members)) for link in ((0, m), (m, 0))]
        control = TorchTransport(*open_lanes(block.members, star, "control", who="member"))
        self._transports = [*pipelines, control]
        self.mailbox = Mailbox(
            self.stage, self.stages, pipelines[0], self.probe, self.watchdog, self.config.timeout,
            pipelines[-1],
        )  # fmt: skip
        self.log = DecisionLog(self._log_file() if block.me == 0 else None)
        if self.config.small_collectives != "off":
            timeout, watchdog = self.config.timeout, self.watchdog
            self.small_collectives = SmallCollectives(
                block.stages, self.config.small_collectives, timeout, watchdog
            )
            self.small_collectives.later = self.later
            self.small_collectives.install()

    def _start(self, arguments: dict[str, Any]) -> None:
        """Begin with 1F1B, or a checkpoint's plan, for this number of microbatches.

        Megatron changes it while a batch size ramps up, on all ranks in the same iteration.
        """
        if self.controller is not None:
            self.controller.close()
        if self._begun and self.mailbox is not None and self._program is not None:
            self.mailbox.discard(unused_posts(self._program, self.stage))
            self._begun = False
        block, pipeline, control = self.block, self._transports[0], self._transports[-1]
        assert block is not None
        count = self._microbatches = arguments["num_microbatches"]
        # An emulated link delays messages, not the word that a receive is posted.
        rendezvous = pipeline.traits.rendezvous and self.emulator is None
        chunks, budget = len(models_of(arguments)), self.config.budget
        halves = self._executes(arguments) and SPLIT not in block.limits
        recompute = self._recomputes(block)
        resumed, estimator = self._resumed(block), None
        if block.me == 0:
            nbytes = message_of(arguments)().nbytes
            hosts, cores = self._machines(pipeline.device, block)
            really = self.emulator is None
            estimator = Estimator(
                count, hosts, cores, nbytes, budget, rendezvous, really,
                chunks=chunks, split=halves, recompute=recompute,
            )  # fmt: skip
            if resumed is not None:
                estimator.resume(block.resumed["delays"])
        peers = range(1, len(block.members)) if block.me == 0 else [0]
        # Megatron's own writers are on the last rank of all.
        last = dist.get_world_size() - 1
        start, adapts = self._starting(chunks), self.config.policy == "adaptive"
        # Of chunks the order is Megatron's: dropout falls as it does there.
        searches = adapts and self._executes(arguments) and chunks == 1
        self.controller = Controller(
            self.stage,
            start,
            {peer: Channel(control, peer) for peer in peers},
            estimator,
            ReplanPolicy(
                self.config.min_gain,
                policy="adaptive" if searches else "warmup",
                fixed=not adapts,
                sends="rendezvous" if rendezvous else "eager",
                ahead=self._ahead,
            ),
            self.log,
            self.config.timeout,
            resumed=resumed,
            trial=trial(start, halves, recompute) if searches and (halves or recompute) else None,
            first=self.iteration,
            reports=block.leads(self.ranks),
            watcher=block.members.index(last) if last in block.members[1:] else None,
            announce=self.announce and block.members[0] == 0,
        )

    def _starting(self, chunks: int) -> Schedule:
        assert self.block is not None
        policy, limits = self.config.policy, self.block.limits
        if policy in SPLITTING and SPLIT in limits:
            raise BadInput("policy", policy, f"not this model: {limits[SPLIT]}; use 1f1b")
        budget, recompute = self.config.budget.microbatches, self._recomputes(self.block)
        return starting_schedule(policy, self.stages, self._microbatches, chunks, budget, recompute)

    def _recomputes(self, block: PlanGroup) -> bool:
        return self.config.recompute and RECOMPUTE not in block.limits

    def _log_file(self) -> Path | None:
        path, replica = Path(self.config.log), mpu.get_data_parallel_rank()
        if not self.config.log or not replica:
            return path if self.config.log else None
        return path.with_suffix(f".replica{replica}{path.suffix}")

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps, on the rank that leads; None on others and before training."""
        if self.controller is None or self.controller.estimator is None:
            return None
        schedule = self.controller.ballot.lasting
        return {"schedule": schedule.text(), "delays": self.controller.estimator.state()}

    def in_short(self) -> str:
        """This moment's plan, for a log line; the same on every rank of the block."""
        if self.controller is None:
            return "stock"
        return f"warmup {','.join(map(str, self.controller.ballot.schedule.warmup))}"

    def scalars(self) -> dict[str, float]:
        """For charts of the training; delays are known on the leader and on the last rank."""
        if self.controller is None:
            return {}
        status, schedule = self.controller.status, self.controller.ballot.schedule
        found = {f"adaptra/warmup/stage-{i}": float(d) for i, d in enumerate(schedule.warmup)}
        for link, seconds in status.get("delays", {}).items():
            found[f"adaptra/delay-ms/{link.replace('>', '-to-')}"] = 1e3 * seconds
        for name in ("predicted", "lower_bound"):
            if name in status:
                found[f"adaptra/{name.replace('_', '-')}-ms"] = 1e3 * status[name]
        if "replans" in status:
            found["adaptra/replans"] = float(status["replans"])
        return found

    def _resumed(self, block: PlanGroup) -> Schedule | None:
        """A checkpoint's plan, if it is for this shape; a job may go on with another one."""
        if block.resumed is None:
            return None
        schedule = Schedule.parse(block.resumed["schedule"])
        check(lower(schedule))
        shape = self.stages, self._microbatches
        budget = self.config.budget.microbatches
        peak = max(peak_in_flight(line, schedule.chunks) for line in schedule.order)
        if (schedule.stages, schedule.microbatches) == shape and peak <= budget:
            return schedule
        self._tell("the checkpoint's plan does not fit this job; starting from 1F1B")
        return None

    def _machines(self, device: torch.device, block: PlanGroup) -> tuple[list[str], float | None]:
        """Stage by stage the machine's identity, and the cores this pipeline can count on."""
        hosts = [block.hosts[rank] for rank in self.ranks]
        if device.type == "cuda" or len(set(hosts)) > 1:
            return hosts, None
        cores = len(os.sched_getaffinity(0)) * self.stages / block.hosts.count(hosts[0])
        return hosts, cores if cores < self.stages else None

    @property
    def _ahead(self) -> int | None:
        return 0 if self.config.receives == "needed" else None

    def _tell(self, text: str) -> None:
        """Say something once, at rank 0."""
        if dist.get_rank() == 0 and text not in self._told:
            self._told.add(text)
            log_line(text)
