"""One rank's plugin in a running Megatron: from the first training iteration to the end."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import schedules

from megatron_adaptra.adapter import handlers
from megatron_adaptra.adapter.native import AdaptraCommunicator
from megatron_adaptra.adapter.profiles import Profile, call
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.ir.program import Program, lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.base import warmup_line
from megatron_adaptra.plan.one_f_one_b import stock_warmup
from megatron_adaptra.runtime.channel import Channel
from megatron_adaptra.runtime.controller import Controller, ReplanRule
from megatron_adaptra.runtime.decisions import DecisionLog
from megatron_adaptra.runtime.mailbox import Mailbox
from megatron_adaptra.runtime.store import StoreNotebook
from megatron_adaptra.runtime.watchdog import Watchdog, say
from megatron_adaptra.telemetry.estimate import Estimator
from megatron_adaptra.telemetry.probe import IterationRecord, Probe
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
        self.iteration = 0
        rules = load_rules(config.emulate_link, self.stages)
        self.emulator = LinkEmulator(self.stage, rules) if rules else None
        self.notebook = StoreNotebook(_machine())
        self.watchdog = Watchdog(self.stage, self.ranks, self.notebook)
        self.probe = Probe(self.stage)
        self.controller: Controller | None = None
        self.mailbox: Mailbox | None = None
        self._transports: list[TorchTransport] = []
        self._lowered: tuple[Schedule, Program] | None = None
        self._microbatches = 0
        self._told: set[str] = set()

    def forward_backward(self, stock: Any, arguments: dict[str, Any]) -> Any:
        """One call of Megatron's forward_backward function; `stock` is the one we stand in for."""
        reason = self._not_ours(stock, arguments)
        if reason:
            self._tell(f"stock schedule: {reason}")
            return stock(**arguments)
        if self.controller is None:
            self._open(arguments)
        assert self.controller is not None
        assert self.mailbox is not None
        self.iteration_done()
        schedule = self.controller.begin(self.iteration)
        if self.emulator is not None:
            self.emulator.iteration = self.iteration
        self.mailbox.begin(self.iteration, self._message(arguments))
        self.probe.begin(self.iteration)
        result = self._run(stock, arguments, self._program(schedule))
        self.mailbox.finish()
        self.probe.pipeline_ends()
        record = self.probe.record
        self.controller.report(record)
        if self.iteration in self.keep_records:
            self.records.append(record)
        self.iteration += 1
        return result

    def iteration_done(self) -> None:
        """The optimizer step is over. Without this call the next iteration's start counts."""
        if self.probe.record.ops and not self.probe.record.end:
            self.probe.iteration_ends()

    def close(self) -> None:
        if self.mailbox is not None:
            self.mailbox.close()
        if self.controller is not None:
            self.controller.close()
        for transport in self._transports:
            transport.close()
        self._transports = []

    def _run(self, stock: Any, arguments: dict[str, Any], program: Program) -> Any:
        assert self.mailbox is not None
        line = program.order[self.stage]
        groups = arguments.get(self.profile.groups) or _default_groups()
        if self._engine(arguments) == "executor":
            first, last = self.stage == 0, self.stage == self.stages - 1
            return handlers.MegatronStage(line, self.mailbox, arguments, groups, first, last).run()
        communicator = AdaptraCommunicator(
            mpu.get_pipeline_model_parallel_group(),
            _config_of(arguments),
            self.profile,
            line,
            self.mailbox,
        )
        ours = {"p2p_communicator": communicator, self.profile.groups: groups}
        return stock(**{**arguments, **ours})

    def _engine(self, arguments: dict[str, Any]) -> str:
        if self.config.engine == "executor":
            reason = handlers.unsupported(_config_of(arguments))
            if not reason:
                return "executor"
            self._tell(f"native engine: the executor does not support {reason}")
        return "native"

    def _not_ours(self, stock: Any, arguments: dict[str, Any]) -> str:
        """Why this call is left to Megatron, or an empty string."""
        if stock is not schedules.forward_backward_pipelining_without_interleaving:
            return "not the 1F1B schedule (interleaved, or one stage)"
        if arguments.get("forward_only"):
            return "evaluation"
        config = _config_of(arguments)
        if getattr(config, "variable_seq_lengths", False):
            return "variable sequence lengths"
        if getattr(config, "mtp_standalone", False):
            return "stand-alone multi-token prediction"
        if arguments.get("adjust_tensor_shapes_fn") is not None:
            return "adjusted tensor shapes"
        count = arguments["num_microbatches"]
        if self._microbatches and count != self._microbatches:
            return f"{count} microbatches instead of {self._microbatches}"
        return ""

    def _open(self, arguments: dict[str, Any]) -> None:
        """Connect to the neighbours and to the leader. Every stage of the pipeline is here."""
        count = self._microbatches = arguments["num_microbatches"]
        device = torch.device(torch.cuda.current_device())
        backend = "nccl" if device.type == "cuda" else "gloo"
        neighbours = [link for s in range(self.stages - 1) for link in ((s, s + 1), (s + 1, s))]
        out, into = open_lanes(self.ranks, neighbours, "pipeline", backend)
        pipeline = TorchTransport(out, into, self.emulator, device)
        star = [link for s in range(1, self.stages) for link in ((0, s), (s, 0))]
        control = TorchTransport(*open_lanes(self.ranks, star, "control"))
        self._transports = [pipeline, control]
        self.mailbox = Mailbox(self.stage, pipeline, self.probe, self.watchdog, self.config.timeout)
        schedule = self._first_schedule(count)
        hosts, cores = self._machines(device)
        # An emulated link delays messages, not the word that a receive is posted.
        rendezvous = pipeline.traits.rendezvous and self.emulator is None
        rule = ReplanRule(self.config.min_gain, sends="rendezvous" if rendezvous else "eager")
        estimator = None
        if self.stage == 0:
            nbytes = self._message(arguments)().nbytes
            budget = self.config.activation_budget
            estimator = Estimator(count, hosts, cores, nbytes, budget, rendezvous)
        replica = mpu.get_data_parallel_rank()
        path = Path(self.config.log) if self.config.log else None
        if path is not None and replica:
            path = path.with_suffix(f".replica{replica}{path.suffix}")
        log = DecisionLog(path if self.stage == 0 else None)
        peers = range(1, self.stages) if self.stage == 0 else [0]
        channels = {peer: Channel(control, peer) for peer in peers}
        self.controller = Controller(
            self.stage, schedule, channels, estimator, rule, log, self.config.timeout
        )

    def _first_schedule(self, count: int) -> Schedule:
        """1F1B, as far as the activation budget allows it."""
        budget = self.config.activation_budget
        depths = [int(min(depth, budget)) for depth in stock_warmup(self.stages, count)]
        order = tuple(warmup_line(depth, count) for depth in depths)
        return Schedule(order, count, policy="1f1b", why="1F1B, as Megatron runs it")

    def _machines(self, device: torch.device) -> tuple[list[str], float | None]:
        """Stage by stage the machine's identity, and the cores this pipeline can count on."""
        mine = _machine()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        self.notebook.meet()
        hosts = [everyone[rank] for rank in self.ranks]
        if device.type == "cuda" or len(set(hosts)) > 1:
            return hosts, None
        cores = len(os.sched_getaffinity(0)) * self.stages / everyone.count(mine)
        return hosts, cores if cores < self.stages else None

    def _program(self, schedule: Schedule) -> Program:
        if self._lowered is None or self._lowered[0] is not schedule:
            self._lowered = schedule, lower(schedule)
        return self._lowered[1]

    def _message(self, arguments: dict[str, Any]) -> Callable[[], torch.Tensor]:
        """What makes empty tensors of a message's shape: (sequence, microbatch, hidden)."""
        config = _config_of(arguments)
        length = arguments.get("decoder_seq_length") or arguments["seq_length"]
        length //= mpu.get_context_parallel_world_size()
        if config.sequence_parallel:
            length //= mpu.get_tensor_model_parallel_world_size()
        shape = (length, arguments["micro_batch_size"], config.hidden_size)
        like = torch.empty(0, dtype=config.pipeline_dtype, device=torch.cuda.current_device())
        return functools.partial(like.new_empty, shape)  # a tenth of an empty() with all arguments

    def _tell(self, text: str) -> None:
        """Say something once, at rank 0."""
        if dist.get_rank() == 0 and text not in self._told:
            self._told.add(text)
            say(text)


def _config_of(arguments: dict[str, Any]) -> Any:
    model = arguments["model"]
    return schedules.get_model_config(model[0] if isinstance(model, list) else model)


def _machine() -> str:
    """The same for two processes exactly if they share a kernel, and so a monotonic clock."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _default_groups() -> Any:
    """The process groups that Megatron's schedule would use by itself."""
    if hasattr(schedules, "_build_default_pg_collection"):
        return schedules._build_default_pg_collection()
    if hasattr(schedules, "ProcessGroupCollection"):
        groups = schedules.ProcessGroupCollection()
        groups.tp_dp_cp = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
    else:
        groups = schedules.GradFinalizeProcessGroups()
    groups.tp = mpu.get_tensor_model_parallel_group()
    groups.cp = mpu.get_context_parallel_group()
    groups.pp = mpu.get_pipeline_model_parallel_group()
    groups.embd = mpu.get_embedding_group(check_initialized=False)
    groups.pos_embd = mpu.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = call(
        mpu.get_data_parallel_group, with_context_parallel=True, partial_data_parallel=False
    )
    return groups
