"""Objects that a rank has at start-up, and connections that its first iteration opens."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.record import RunRecord
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.adapt.switch import Acts, acts_of, always
from megatron_adaptra.adapter.compat.closed_groups import Tie
from megatron_adaptra.adapter.compat.features import has_graphs
from megatron_adaptra.adapter.compat.patches import Resolved, patch
from megatron_adaptra.adapter.compat.profiles import Profile
from megatron_adaptra.adapter.compat.schedule_args import (
    ScheduleArgs,
    config_of,
    message_bytes,
    models_of,
)
from megatron_adaptra.adapter.limits import APART, MOVED, ROUTES, TOGETHER, Case, why_not
from megatron_adaptra.adapter.pipeline.cross_links import CrossLinks
from megatron_adaptra.adapter.pipeline.emulation import Emulation
from megatron_adaptra.adapter.pipeline.findings import diagnosis_of, replica_distances
from megatron_adaptra.adapter.pipeline.job_gather import reason_anywhere
from megatron_adaptra.adapter.pipeline.plan_group import PlanGroup
from megatron_adaptra.agree.agreement import DecisionStore
from megatron_adaptra.agree.channel import Channel
from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.agree.job_log import JobLog
from megatron_adaptra.agree.relink import Relink
from megatron_adaptra.agree.store import KeyValueStore
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import NoConnections
from megatron_adaptra.base.log import LogOnce, log_line
from megatron_adaptra.config import UNLIMITED, AdaptraConfig, Budget
from megatron_adaptra.device.base import Device
from megatron_adaptra.device.cuda import CudaDevice
from megatron_adaptra.device.staging import Staging
from megatron_adaptra.diagnose.pipeline import PipelineDiagnosis
from megatron_adaptra.emulate.links import LinkEmulator
from megatron_adaptra.emulate.worker_emulator import WorkerEmulator
from megatron_adaptra.execute.failure_log import FailureLog
from megatron_adaptra.execute.guarded_probe import GuardedProbe
from megatron_adaptra.execute.mailbox import Mailbox
from megatron_adaptra.execute.small.small_collectives import (
    FUNCTIONS,
    DeferHook,
    SmallCollectives,
)
from megatron_adaptra.execute.watchdog import Watchdog
from megatron_adaptra.ir.program import Neighbours
from megatron_adaptra.ir.routes import Routes
from megatron_adaptra.measure.link_probe import LinkProbes
from megatron_adaptra.transport.base import Transport
from megatron_adaptra.transport.connect import torch_waits
from megatron_adaptra.transport.descriptors import too_few
from megatron_adaptra.transport.engine.engine_wire import EngineWire
from megatron_adaptra.transport.gloo import GlooTransport
from megatron_adaptra.transport.opened import missing_engine, open_wire
from megatron_adaptra.transport.wire import GlooWire, Wire

GROUPS = 4  # sets of ranks with small collectives: all, a model's, its embeddings', experts'


@dataclass(frozen=True)
class RankContext:
    """A context describes this rank before anything is connected, from activation on.

    Args:
        config: the job's settings.
        profile: what differs between releases of Megatron.
        patches: what this job may patch.
        stage: this rank's.
        ranks: global ranks of its pipeline, by stage.
        worker: this rank's number among those that are planned together, as in `ir.routes`; its
            stage where each replica is planned by itself.
        workers: global ranks of all workers, replica by replica.
        emulator: delays messages; None where no link is emulated.
        failure_log: shared with the other ranks of this machine: who has failed, and why.
        watchdog: knows what this rank waits for.
        guard: through which the training calls all that adapts it, so that no error ends it.
        probe: measures each op and message, through the guard.
        notices: what is logged once, at rank 0; None if it has failed to open.
        job_log: lines of all ranks for rank 0.
        device: what runs the ops, in whose memory messages are. On a GPU a healthy pipeline is
            Megatron's own.
        worker_emulator: makes ops slow, where this worker is to be; the probe's are already. None
            where no worker of the job is emulated.
        acts: returns whether this rank's loops put proposals to the vote.
    """

    config: AdaptraConfig
    profile: Profile
    patches: Resolved
    stage: int
    ranks: tuple[int, ...]
    worker: int
    workers: tuple[int, ...]
    emulator: LinkEmulator | None
    failure_log: FailureLog
    watchdog: Watchdog
    guard: Guard
    probe: GuardedProbe
    notices: LogOnce | None
    job_log: JobLog
    device: Device
    worker_emulator: WorkerEmulator | None
    acts: Acts

    @classmethod
    def create(
        cls, config: AdaptraConfig, profile: Profile, patches: Resolved, device: Device
    ) -> RankContext:
        """Make a context from Megatron's existing groups. Raises BadInput for an unusable rule.

        The settings' `timeout` becomes the one that may end a training: Megatron's own, plus the
        seconds that it takes to name the rank that is late.
        """
        group = mpu.get_pipeline_model_parallel_group()
        limit = torch_waits(group) or config.timeout
        # Torch's error names no rank, so a line does a little before that timeout ends.
        late = min(config.timeout, max(limit - waits.CHAIN, limit / 2))
        config = replace(config, timeout=min(limit + waits.CHAIN, waits.FOREVER))
        stage, ranks = group.rank(), tuple(dist.get_process_group_ranks(group))
        why = "off"
        if config.reroute != "off":
            why = why_not(TOGETHER, Case(config, on_device=device.behind))
        replicas = [0] if why else replica_distances()
        together = len(replicas) > 1
        worker = mpu.get_data_parallel_rank() * len(ranks) + stage if together else stage
        workers = tuple(rank + apart for apart in replicas for rank in ranks)
        who = f"rank {dist.get_rank()} on {socket.gethostname()}"
        emulation = Emulation.of_rank(config, stage, len(ranks), together)
        guard = Guard(f"stage {stage} (rank {dist.get_rank()})")
        lines = guard.call(JobLog.started, dist.get_rank(), config.log_file("findings"))
        shared = guard.call(FailureLog.shared)
        failure_log = shared if isinstance(shared, FailureLog) else FailureLog()
        context = cls(
            config,
            profile,
            patches,
            stage,
            ranks,
            worker,
            workers,
            emulation.links,
            failure_log,
            Watchdog(worker, workers, failure_log, len(replicas), late),
            guard,
            emulation.probe(guard, worker, device),
            guard.call(LogOnce, dist.get_rank() == 0),
            lines if isinstance(lines, JobLog) else JobLog(dist.get_rank(), None, None),
            device,
            emulation.worker,
            guard.call(acts_of, config, who, dist.get_rank() == 0) or always,
        )
        if config.reroute != "off" and why:
            context.say(f"each replica is planned by itself: {why}")
        adapts = len(ranks) > 1 and config.engine != "stock" and not device.behind
        falls_back = config.transport == "auto" and not config.encrypt
        if adapts and falls_back and (why := missing_engine(config.transport, config.encrypt)):
            # At once: the first iteration of a large job is minutes away.
            context.say(_over_gloo(f"rank {dist.get_rank()}: {why}"))
        return context

    def say(self, text: str) -> None:
        """Log `text` once, at rank 0."""
        if self.notices is not None:
            self.guard.later(self.notices.line, text)

    @property
    def job_replica(self) -> int | None:
        """This rank's replica in the job; None where the job has one, or one plan for all."""
        several = mpu.get_data_parallel_world_size() > 1 and self.replicas == 1
        return mpu.get_data_parallel_rank() if several else None

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.ranks)

    @property
    def replicas(self) -> int:
        """The number of replicas that are planned together; 1 where each is planned by itself."""
        return len(self.workers) // len(self.ranks)

    @property
    def replica(self) -> int:
        """This rank's replica, by number among those that are planned together."""
        return self.worker // len(self.ranks)

    @property
    def over_own_messages(self) -> bool:
        """True where a healthy pipeline is Megatron's own: on GPUs, and in a job that observes."""
        return self.device.behind or self.config.observes

    @property
    def budget(self) -> Budget:
        """The limit on activations; on a device, whose memory is scarce, there always is one."""
        budget = self.config.budget
        return Budget(auto=True) if self.device.behind and budget == UNLIMITED else budget

    @property
    def ahead(self) -> int | None:
        """The number of ops by which a receive is posted before it is needed; see `lower`."""
        return 0 if self.config.post_receives == "on-demand" else None


@dataclass(frozen=True)
class Wiring:
    """A wiring holds all that is open from the first training iteration to the end of the job.

    `wire`: over which all of it goes. `pipelines`: one transport, or one for each kind of message,
    for messages on `device`. `control`: between the leader of the plan group and its other members.
    `channels`: over control, by member: the leader's to all others, theirs to the leader. `store`:
    where decisions are when control is lost. `log`: of the leader's decisions. `patched`: torch's
    functions, for which `small_collectives` stands in. `probes`: of links. `cross`: links between
    replicas, where they have one plan. `diagnosis`: the leader's, of all runs. A part that has
    failed to open through the `guard` is None.
    """

    plan_group: PlanGroup
    wire: Wire
    device: torch.device
    pipelines: tuple[Transport, ...]
    control: Transport
    channels: dict[int, Channel] | None
    store: DecisionStore | None
    mailbox: Mailbox
    small_collectives: SmallCollectives
    patched: contextlib.ExitStack
    log: DecisionLog[PlanDecision] | None
    guard: Guard
    probes: LinkProbes | None
    cross: CrossLinks | None
    diagnosis: PipelineDiagnosis | None

    @property
    def rendezvous(self) -> bool:
        """True where a message waits at its sender until its receive is posted."""
        return self.pipelines[0].traits.rendezvous

    @property
    def staging(self) -> Staging | None:
        """The host's memory that messages of a GPU go through; None where they are not on one."""
        if self.device.type != "cuda" or not isinstance(self.wire, EngineWire):
            return None
        return self.wire.staging(self.device)

    def close(self) -> None:
        """Put torch's collectives back and close all connections."""
        with contextlib.ExitStack() as stack:  # all are closed, even if one fails; patches first
            if self.log is not None:
                stack.callback(self.guard.attempt, waits.END, self.log.close)
            stack.callback(self.wire.close)
            for transport in (self.control, *self.pipelines):
                stack.callback(transport.close)
            if self.probes is not None:
                stack.callback(self.guard.call, self.probes.close)
            stack.callback(self.small_collectives.close)
            stack.callback(self.patched.close)


def open_wiring(
    context: RankContext,
    arguments: ScheduleArgs,
    resumed: Any,
    limits: dict[str, str],
    defer_hooks: Sequence[DeferHook],
    ties: Sequence[Tie],
) -> Wiring:
    """Connect to the neighbours and to the leader. Every rank is here.

    `resumed`: what this rank brings from a checkpoint. `limits`: what its model does not allow, and
    why. `defer_hooks`: see SmallCollectives. `ties`: of its ops with other ranks. Raises
    NoConnections, on all ranks alike.
    """
    config = context.config
    group = PlanGroup.gather(resumed, limits, ties, context.replicas > 1)
    if reason := too_few(group.left):
        raise NoConnections(reason)
    name = f"{group.serial}/control"
    device = torch.device(torch.cuda.current_device())
    chunks = len(models_of(arguments))
    # A graph's outputs are at the same addresses in each of its replays.
    copies = has_graphs(config_of(arguments))
    opened = _connect(context, group, device, chunks, name, copies)
    wire, pipelines, control, probed = opened
    if group.joined:
        no_work = ", and no work moves between them" if context.replicas > 1 else ""
        context.say(f"replicas run the same order of ops{no_work}: {group.joined}")
    if group.joined or ROUTES in group.limits:  # then it does not matter which ones
        group.limits.pop(MOVED, None)
    for what, reason in group.limits.items():
        context.say(f"{what} is not possible: {reason}")
    if group.joined:  # as is logged already
        group.limits.update({ROUTES: group.joined, APART: group.joined})
    context.guard.call(context.failure_log.connected, group.serial, group.visible_pids)
    peers = range(1, len(group.members)) if group.leader else [0]
    channels = context.guard.call(
        lambda: {
            peer: Channel(control, peer, _relink(wire, control, group.members, peer, name))
            for peer in peers
        }
    )
    mailbox = Mailbox(
        Neighbours(context.worker, Routes(context.stages, chunks, context.replicas)),
        pipelines[0], context.probe, context.watchdog, config.timeout, pipelines[-1],
    )  # fmt: skip
    collectives = SmallCollectives(
        group.stages, config.small_collectives, config.timeout, context.watchdog,
        lambda text: context.guard.later(log_line, text),
        wire=wire, job=str(group.serial), most=min(group.left) // GROUPS,
        within=group.members if context.device.behind else None, clock=context.device,
    )  # fmt: skip
    collectives.active = not context.over_own_messages  # on GPUs until a link is slow
    collectives.timed = context.over_own_messages
    collectives.defer_hooks = defer_hooks
    patched = contextlib.ExitStack()
    if config.small_collectives != "off":
        stand_ins = collectives.stand_ins({name: getattr(dist, name) for name in FUNCTIONS})
        patched = patch("small-collectives", **stand_ins)
    log = context.guard.call(_decision_log, config, group.leader)
    store = context.guard.call(lambda: DecisionStore(KeyValueStore("adaptra/")))
    neighbours = sorted({b for a, b in _links(context, chunks) if a == context.worker})
    # Beside Megatron's own messages some probes are as large; ours measure as much themselves.
    nbytes = context.guard.call(message_bytes, arguments) if context.over_own_messages else 0
    probes = context.guard.call(LinkProbes, probed, neighbours, nbytes or 0)
    cross = None
    if context.replicas > 1:
        transports = {"pipeline": pipelines[0], "probes": probed}
        cross = CrossLinks(context.worker, context.stages, context.workers, wire, transports)
    return Wiring(
        group, wire, device, pipelines, control, channels, store, mailbox, collectives, patched,
        log, context.guard, probes, cross, context.guard.call(_diagnosis, context, group),
    )  # fmt: skip


def _diagnosis(context: RankContext, group: PlanGroup) -> PipelineDiagnosis | None:
    if not group.leader:
        return None
    return diagnosis_of(
        context.job_log,
        context.workers,
        context.stages,
        group.names,
        context.job_replica,
        compares=not group.joined,
    )


def _relink(
    wire: Wire, control: Transport, members: Sequence[int], peer: int, name: str
) -> Relink | None:
    """Return what makes a lost control connection anew; None where the wire does so by itself."""
    if isinstance(wire, GlooWire) and isinstance(control, GlooTransport):
        return Relink(control, members, peer, name, wire.devices)
    return None


def _connect(
    context: RankContext, group: PlanGroup, device: torch.device, chunks: int, name: str,
    copies: bool,
) -> tuple[Wire, tuple[Transport, ...], Transport, Transport]:  # fmt: skip
    """Open a wire, the pipeline's transports over it, control, which is called `name`, and probes.

    `copies`: as for EngineWire. A collective: raises NoConnections on all ranks where some cannot
    connect. A ring of two stages has both kinds of messages on one link: each kind gets its
    transport.
    """
    config, emulator, workers = context.config, context.emulator, context.workers
    links = _links(context, chunks)
    kinds = ["pipeline", "gradients"] if chunks > 1 and context.stages == 2 else ["pipeline"]

    def over_gloo(missing: str) -> None:
        if device.type == "cuda":
            raise NoConnections(f"messages on GPUs need our engine: {missing}")
        if config.transport == "auto":
            context.say(_over_gloo(missing))

    def opens(wire: Wire) -> Iterator[Transport]:
        for kind in kinds:
            yield wire.transport(f"{group.serial}/{kind}", workers, links, emulator, device)
        yield wire.control(name, group.members)
        yield wire.probes(f"{group.serial}/probes", workers, links, emulator)

    decisions = _log_file(config)
    wire, (*pipelines, control, probed) = open_wire(
        str(group.serial), group.clock_ids[dist.get_rank()], config.timeout, reason_anywhere, opens,
        asked=config.transport, encrypt=config.encrypt, over_gloo=over_gloo,
        # NCCL's network for this GPU, and nothing else, shows how its messages are doing.
        gpu=lambda: context.device.pci if isinstance(context.device, CudaDevice) else "",
        log=decisions and decisions.with_suffix(f".connections{decisions.suffix}"), copies=copies,
    )  # fmt: skip
    return wire, tuple(pipelines), control, probed


def _over_gloo(missing: str) -> str:
    """Return the line that says why there is no engine. `missing`: the rank, and the reason."""
    return f"messages go over gloo, for there is no engine: {missing}"


def _links(context: RankContext, chunks: int) -> list[tuple[int, int]]:
    """Return the links both ways between neighbouring stages; several chunks make a ring of them.

    Links between replicas are opened when a plan needs them (CrossLinks).
    """
    stages = context.stages
    pairs = [(s, s + 1) for s in range(stages - 1)]
    if chunks > 1 and stages > 2:
        pairs.append((stages - 1, 0))
    first = context.worker - context.stage
    return [(first + x, first + y) for a, b in pairs for x, y in ((a, b), (b, a))]


def _decision_log(config: AdaptraConfig, leads: bool) -> DecisionLog[PlanDecision]:
    """Open the log of a rank that `leads`; others decide nothing."""
    if not leads:
        return DecisionLog(PlanDecision, None)
    folder = Path(config.record) if config.record else None
    record = folder and folder / f"replica-{mpu.get_data_parallel_rank()}.jsonl"
    return DecisionLog(PlanDecision, _log_file(config), RunRecord(record))


def _log_file(config: AdaptraConfig) -> Path | None:
    replica = mpu.get_data_parallel_rank()
    return config.log_file(f"replica{replica}" if replica else "")
