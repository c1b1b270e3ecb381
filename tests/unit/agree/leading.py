"""Controllers of all stages on threads, fed with records of iterations that never took place."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from agree.pipeline import on_threads, schedule
from measure.records import record
from patience import PATIENCE
from transport.loopback import LoopbackNetwork

from megatron_adaptra.adapt.leader import Leader
from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.pipeline.remedy import PipelineRemedy
from megatron_adaptra.adapt.record import RunRecord
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.agree.agreement import DecisionStore, starting_ballot
from megatron_adaptra.agree.bundle import SCHEDULE
from megatron_adaptra.agree.channel import Channel
from megatron_adaptra.agree.controller import Controller, Member
from megatron_adaptra.agree.store import KeyValueStore
from megatron_adaptra.diagnose.finding import Worker
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.report import Memory
from megatron_adaptra.plan.pipeline.fixed import stock_warmup

FORWARD, BACKWARD = 0.010, 0.020
Delays = Callable[[int], Mapping[tuple[int, int], float]]  # iteration -> link -> seconds


@dataclass
class Run:
    """`ran[stage][i]` is the schedule of iteration i; `leader` is closed.

    `statuses`: of the watcher, the last one it has received, if any.
    """

    leader: Leader
    ran: list[list[Schedule]] = field(default_factory=list)
    statuses: list[dict[str, Any]] = field(default_factory=list)


class WatchedLoop(Loop[PipelineRemedy]):
    """A loop that notifies the test when it has dealt with an iteration."""

    def __init__(self, *args: Any) -> None:
        self.moved = threading.Condition()
        super().__init__(PipelineRemedy(*args), announce=None)

    def _take(self, report: Any) -> None:
        super()._take(report)
        with self.moved:
            self.moved.notify_all()


class Watched(Leader):
    """A Leader that does so at each step of a vote."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._moved = args[3].moved
        super().__init__(*args, **kwargs)

    def _on_message(self, channel: Channel, message: dict[str, Any]) -> bool:
        more = super()._on_message(channel, message)
        with self._moved:
            self._moved.notify_all()
        return more

    def _lose(self, channel: Channel, error: Exception) -> None:
        super()._lose(channel, error)
        with self._moved:
            self._moved.notify_all()

    def wait_for(self, iteration: int, votes: bool) -> None:
        """Until the reports of `iteration` are dealt with and, with `votes`, what was proposed is
        decided."""

        def done() -> bool:
            lost = any(channel.lost for channel in self._channels.values())
            decided = self._open is None or self._open.committed is not None or lost
            return self.loop.seen >= iteration and (decided or not votes)

        with self._moved:
            assert self._moved.wait_for(done, PATIENCE), f"iteration {iteration} is not dealt with"


def workers(stages: int) -> list[Worker]:
    """Of a pipeline of so many `stages`, each on a host of its own."""
    return [Worker(10 + stage, f"host{stage}") for stage in range(stages)]


def drive(
    path: Path,
    delays: Delays,
    iterations: int,
    *,
    stages: int = 3,
    count: int = 8,
    seed: int = 0,
    pause: float = 0.002,
    control: LoopbackNetwork | None = None,
    paced: bool = False,
    followers: int = 0,
    resumed: Schedule | None = None,
    watcher: int | None = None,
    at: Callable[[int, int], None] = lambda stage, iteration: None,
    channels: Mapping[int, type[Channel]] | None = None,
    votes: bool = True,
    store: dist.Store | None = None,
    rule: ReplanPolicy = ReplanPolicy(),  # noqa: B008  # frozen
    memory: Memory | None = None,
    met: Callable[[int, int], str] = lambda stage, iteration: "",
    record_at: Path | None = None,
    **estimate: Any,
) -> Run:
    """`at(stage, iteration)` is called by every stage between the start and the report.

    All have begun an iteration before any reports it, as a pipeline brings it about. `paced`: an
    iteration is over when the leader has dealt with it and, with `votes`, those on its proposal are
    in, as when iterations take long; else it takes about `pause` seconds,
    whatever the control threads do. `followers`: ranks beyond the pipeline that run its order;
    `resumed`: the plan of a checkpoint, made for links of 40 ms. `store`: torch's; one that works
    where none is given. `memory`: what every stage
    measures from its second iteration on; `met`: see StageReport, by stage and iteration;
    `estimate`: more arguments of the Estimator. `record_at`: of the run's record.
    """
    members = stages + followers
    network = control or LoopbackNetwork()
    start = schedule(stock_warmup(stages, count), count)
    store = dist.HashStore() if store is None else store
    barrier = threading.Barrier(members)
    leaders: list[Leader] = []
    watchers: list[Controller] = []

    def body(stage: int) -> list[Schedule]:
        rng = random.Random(seed * 100 + stage)
        transport = network.open(stage)
        channel = (channels or {}).get(stage, Channel)
        peers = range(1, members) if stage == 0 else [0]
        made = {peer: channel(transport, peer) for peer in peers}
        ballot = starting_ballot(start, resumed, None, 0)
        decisions = DecisionStore(KeyValueStore("", lambda: store))
        controller: Watched | Member
        if stage == 0:
            estimator = Estimator(count, ["one"] * stages, None, 1000, **estimate)
            if resumed is not None:
                estimator.resume({f"{a}>{b}": 0.04 for a, b in estimator.charts})
            log = DecisionLog(PlanDecision, path, RunRecord(record_at))
            loop = WatchedLoop(start, estimator, rule, log, workers(stages))
            controller = Watched(ballot, made, decisions, loop, watcher=watcher)
            leaders.append(controller)
        else:
            controller = Member(ballot, made, decisions, PATIENCE, reports=stage < stages)
        if stage == watcher:
            watchers.append(controller)
        ran = []
        try:
            for iteration in range(iterations):
                ran.append(controller.begin(iteration)[SCHEDULE])
                at(stage, iteration)
                if not paced:
                    time.sleep(rng.uniform(0.0, pause))
                barrier.wait(PATIENCE)
                now = delays(iteration)
                sources = {s: now.get((s, stage), 1e-4) for s in (stage - 1, stage + 1)}
                sources = {s: d for s, d in sources.items() if 0 <= s < stages}
                costs = {"forward": FORWARD, "backward": BACKWARD, "count": count}
                done = record(stage, iteration, sources, **costs)
                done.memory = memory if iteration else None
                done.met = met(stage, iteration)
                done.through = {source: f"eth{source}" for source in sources}
                controller.report(done)
                if not paced:
                    time.sleep(rng.uniform(0.0, pause))
                    continue
                if isinstance(controller, Watched):
                    controller.wait_for(iteration, votes)
                barrier.wait(PATIENCE)
        except BaseException:
            barrier.abort()
            raise
        controller.close()
        if isinstance(controller, Leader):
            controller.loop.log.close()
        transport.close()
        return ran

    ran = on_threads(members, body)
    network.close()
    return Run(leaders[0], ran, [controller.status for controller in watchers])


def warmups(ran: Sequence[Schedule]) -> list[tuple[int, ...]]:
    """The warmup depths in force, one after the other."""
    out = [ran[0].warmup]
    for one in ran:
        if one.warmup != out[-1]:
            out.append(one.warmup)
    return out
