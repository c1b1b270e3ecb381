"""The estimator of several replicas: from all workers' reports to ReplicaConditions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_adaptra.base.errors import AdaptraError, BadInput
from megatron_adaptra.ir.conditions import LinkState
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import Path, worker_name
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.core_use import OwnCores
from megatron_adaptra.measure.detect import RELATIVE, DelayChart, apart
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.link_estimates import LONGEST, THIN, LinkEstimates
from megatron_adaptra.measure.op_seconds import Correction, OpSeconds, StageOps
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.measure.slow_workers import SlowWorkers

STALE = 1000  # iterations after which a cross path has to be measured anew
_MOST = 1e15  # seconds, bytes or moments; more is nonsense


class Changed(NamedTuple):
    """A change lists the paths between workers, and the workers, that are not as planned for."""

    paths: list[Path]
    workers: list[int]

    @property
    def any(self) -> bool:
        """True where there is a path or a worker."""
        return bool(self.paths or self.workers)


class _Costs(NamedTuple):
    """A set of costs holds what ops take.

    `ops`: by stage, on a healthy worker. `slow`: by slow worker, how many times as long they take.
    `cores`, `core_share`: see Conditions. `shares_of_slow`: by slow worker, its core share.
    """

    ops: list[OpSeconds]
    slow: dict[int, float]
    cores: float | None = None
    core_share: tuple[float, ...] = ()
    shares_of_slow: Mapping[int, float] = MappingProxyType({})


class ReplicaEstimator:
    """An estimator learns the costs of all workers, numbered as in `ir.routes`, and their links.

    The links of each replica's own pipeline are measured whether they carry messages or only
    probes; a *cross path*, between workers of two replicas, from the first message or probe on.
    Until then it counts as healthy, and as not proven.

    Op seconds are by the wall clock. Where all workers share the cores of one machine that counts
    how long threads queue for a core, they are those on a core of one's own (see `CoreUse`), and
    the conditions have the cores. On several machines the seconds contain what sharing costs, which
    is right as long as others run as much as they do now.

    Args:
        estimators: one of each replica, with its workers, alike in all else but hosts.

    `slow_workers`: see SlowWorkers; `correction`: see Correction.

    Raises:
        BadInput: there are fewer than two, they differ, or have virtual stages.
    """

    def __init__(self, estimators: Sequence[Estimator]) -> None:
        self.estimators = tuple(estimators)
        if len(self.estimators) < 2:
            raise BadInput("replicas", len(self.estimators), "at least 2")
        first = self.estimators[0]
        self.stages, self.replicas = len(first.hosts), len(self.estimators)
        for other in self.estimators:
            if len(other.hosts) != self.stages or other.microbatches != first.microbatches:
                shape = f"{len(other.hosts)} stages x {other.microbatches} microbatches"
                raise BadInput("replicas", shape, "all have as many as the first one")
            if other.chunks > 1:
                allowed = "1: virtual stages are not planned across replicas"
                raise BadInput("chunks", other.chunks, allowed)
        self.workers = self.stages * self.replicas
        self.slow_workers = SlowWorkers(self.stages, self.replicas)
        self.correction = Correction()
        self._ops = [StageOps(None, 1) for _ in range(self.workers)]
        hosts = dict(enumerate(host for one in self.estimators for host in one.hosts))
        self._cross = LinkEstimates(
            hosts, first.message_bytes, rendezvous=first.rendezvous, links=(),
            shared=first.cores is not None,
        )  # fmt: skip
        cores = first.cores if len(set(hosts.values())) == 1 else None
        self._cores = cores if cores is not None and cores < self.stages else None
        self._on_cores = OwnCores(self.workers, self._cores is not None)
        self._updates = 0
        self._seen: dict[Path, int] = {}  # by cross path, the last update with a sample
        self._lost: set[Path] = set()

    def usable(self, reports: Mapping[int, StageReport]) -> dict[int, StageReport]:
        """Return those of the `reports`, by worker, whose values are possible."""
        return {w: report for w, report in reports.items() if self._can_be(w, report)}

    def _can_be(self, worker: int, report: StageReport) -> bool:
        wall = report.wall
        if worker not in range(self.workers) or report.worker != worker:
            return False
        if ("I" in wall) != ("W" in wall):  # both halves of a backward, or none
            return False
        ops = [x for row in (wall, report.cpu, report.queued, report.idle) for x in row.values()]
        return all(0 <= x <= LONGEST for x in ops) and all(
            -_MOST <= x <= _MOST
            for name, value in vars(report).items()
            if name != "ops"
            for x in _numbers(value)
        )

    def update(self, reports: Mapping[int, StageReport]) -> Changed:
        """Take one iteration; return what has changed for good.

        Args:
            reports: by worker, only `usable` ones. Some may be missing.
        """
        for worker, report in reports.items():
            self._ops[worker].update(report)
        paths: list[Path] = []
        for replica, estimator in enumerate(self.estimators):
            own = range(replica * self.stages, (replica + 1) * self.stages)
            rows = [reports[worker] for worker in own if worker in reports]
            over_stock = any(row.ops for row in rows)
            if not rows or (over_stock and len(rows) < self.stages):
                continue
            try:
                paths += estimator.update(rows)
            except (AdaptraError, KeyError, ValueError):  # ops that do not fit each other
                continue
        paths += self._update_cross(reports)
        walls = {worker: report.wall for worker, report in self._on_cores.of(reports).items()}
        return Changed(paths, self.slow_workers.update(walls))

    def _update_cross(self, reports: Mapping[int, StageReport]) -> list[Path]:
        self._updates += 1
        self._cross.samples = {}
        for path in [p for p, last in self._seen.items() if last < self._updates - STALE]:
            self._cross.forget(path)
            del self._seen[path]
        rows = []
        for worker, report in reports.items():
            sources = [source for source in report.links if self._crosses(source, worker)]
            for source in sources:
                self._cross.watch((source, worker))
                self._seen[source, worker] = self._updates
                self._lost.discard((source, worker))
            if sources:
                rows.append(replace(report, ops=None, port=None))
        return self._cross.update(rows, self.stage_seconds()) if rows else []

    def _crosses(self, source: int, target: int) -> bool:
        """Return whether two workers are in adjacent stages of different replicas."""
        (one, stage), (other, near) = divmod(source, self.stages), divmod(target, self.stages)
        return one != other and one < self.replicas and abs(stage - near) == 1

    def measure_budget(self, reports: Mapping[int, StageReport]) -> bool:
        """Take `reports` as in `update`; return whether they change budgets' microbatches."""
        rows: list[list[StageReport]] = [[] for _ in self.estimators]
        for worker, report in reports.items():
            rows[worker // self.stages].append(report)
        pairs = zip(self.estimators, rows, strict=True)
        each = [estimator.measure_budget(row) for estimator, row in pairs]
        return any(each)

    @property
    def budgets(self) -> tuple[float, ...]:
        """The microbatches in flight that each worker may have."""
        return tuple(most for one in self.estimators for most in one.budgets)

    @property
    def split(self) -> bool:
        """True where backwards may run in halves."""
        return all(one.split for one in self.estimators)

    @property
    def known(self) -> bool:
        """True once every worker has reported, which `conditions` needs."""
        return all(ops.known for ops in self._ops) and all(e.known for e in self.estimators)

    @property
    def calibrated(self) -> bool:
        """True once the normal delay of every link of a pipeline is known."""
        return self.known and all(estimator.calibrated for estimator in self.estimators)

    @property
    def stock_measured(self) -> bool:
        """True where a link's seconds are known for Megatron's own messages, apart from ours."""
        return any(one.stock_measured for one in self.estimators)

    @property
    def charts(self) -> dict[Path, DelayChart]:
        """The charts of the seconds that a message takes, by path."""
        every = (*(estimator.charts for estimator in self.estimators), self._cross.charts)
        return {path: chart for charts in every for path, chart in charts.items()}

    @property
    def samples(self) -> dict[Path, float]:
        """The seconds of the paths that were measured in the last iteration."""
        every = (*(estimator.samples for estimator in self.estimators), self._cross.samples)
        return {path: seconds for samples in every for path, seconds in samples.items()}

    def stage_seconds(self) -> float:
        """Return the seconds of one microbatch on the slowest worker."""
        return max(estimator.stage_seconds() for estimator in self.estimators)

    def proven(self, path: Path) -> bool:
        """Return whether a `path` is a pipeline's own, or measured often enough to plan with."""
        chart = self._cross.charts.get(path)
        own = path[0] // self.stages == path[1] // self.stages
        return own or (chart is not None and chart.level is not None)

    def unproven(self, schedule: Schedule) -> list[Path]:
        """Return the cross paths of a `schedule` to be probed before it comes into force."""
        paths = schedule.routes.cross_paths(schedule.microbatches)
        return sorted(path for path in paths if not self.proven(path))

    def lost(self, paths: Iterable[Path]) -> None:
        """Note that cross `paths` cannot be measured: no plan uses them until they are."""
        self._lost |= {path for path in paths if not self.proven(path)}

    def forget_lost(self) -> None:
        """Allow plans to use the `lost` paths again."""
        self._lost.clear()

    def accept(self) -> None:
        """Note that the plan in force is made for everything as it is now."""
        for estimator in self.estimators:
            estimator.accept()
        self._cross.accept()
        self.slow_workers.accept()

    def slow(self) -> dict[int, float]:
        """Return, by slow worker, its multiple of a healthy one's seconds, as in `conditions`."""
        return self._costs().slow

    def learn(self, predicted: float, measured: float) -> None:
        """Take note of an iteration's `predicted` (uncorrected) and `measured` seconds."""
        self.correction.learn(predicted, measured)

    def learn_stock(self, predicted: float, measured: float) -> None:
        """Take note of `predicted` and `measured` seconds over Megatron's own messages."""
        for estimator in self.estimators:
            estimator.learn_stock(predicted, measured)

    @property
    def stock_extra(self) -> float:
        """The seconds that an iteration over Megatron's own messages takes beyond the model's."""
        return max(estimator.stock_extra for estimator in self.estimators)

    def conditions(self, corrected: bool = True, native: bool = False) -> ReplicaConditions:
        """Return what to plan for; only once everything is `known`.

        `corrected`: multiply op seconds by `correction`. `native`: for stock's messages and step.
        Seconds are those of each stage's healthy workers and links; those that differ are listed.
        """
        each = [one.conditions(False, native) for one in self.estimators]
        costs, scale = self._costs(), self.correction.factor if corrected else 1.0
        ops = [OpSeconds(*(scale * x for x in op)) for op in costs.ops]
        # The slowest replica has the shortest step: the others wait for it in theirs.
        step = min(each, key=lambda one: one.step_seconds)
        links, own = {}, {}
        for pair in each[0].links:
            row = [one.links[pair] for one in each]
            row_seconds = sorted(row, key=self._message_seconds)
            links[pair] = row_seconds[(len(row) - 1) // 2]
            for replica, state in enumerate(row):
                own[replica * self.stages + pair[0], replica * self.stages + pair[1]] = state
        pipeline = replace(
            each[0],
            forward=tuple(op.forward for op in ops),
            backward_input=tuple(op.backward_input for op in ops),
            backward_weight=tuple(op.backward_weight for op in ops),
            backward=tuple(op.backward for op in ops) if each[0].backward else (),
            recomputation=tuple(op.recomputation for op in ops) if each[0].recomputation else (),
            links=links,
            step_seconds=step.step_seconds,
            step_sync=step.step_sync,
            split=self.split,
            cores=costs.cores,
            core_share=costs.core_share,
            ports={},
        )
        ports = {
            replica * self.stages + stage: rate
            for replica, one in enumerate(each)
            for stage, rate in one.ports.items()
        }
        return ReplicaConditions(
            pipeline,
            self.replicas,
            slow=costs.slow,
            paths=dict(self._that_differ(links, own)),
            ports=ports,
            activation_budget=self.budgets,
            core_share=costs.shares_of_slow,
        )

    def _costs(self) -> _Costs:
        factors = self.slow_workers.factors()
        slow = {worker: factor for worker, factor in factors.items() if factor != 1.0}
        stages, uses = range(self.stages), self._on_cores.uses
        if self._cores is None or not all(use.known for use in uses):
            seconds = [one.seconds() for one in self._ops]
            return _Costs([self._healthy(stage, factors, seconds) for stage in stages], slow)
        seconds = [use.seconds() for use in uses]
        ops = [self._healthy(stage, factors, seconds) for stage in stages]
        longer, shares = {}, {}
        for worker in slow:
            use = uses[worker]
            beyond = 1 + use.longer
            times = beyond * sum(seconds[worker][:2]) / sum(ops[worker % self.stages][:2])
            if apart(times, 1.0):
                longer[worker], shares[worker] = times, use.share / beyond
        healthy = tuple(
            median(uses[w].share for w in self._healthy_of(stage, factors)) for stage in stages
        )
        return _Costs(ops, longer, self._cores, healthy, shares)

    def _healthy(
        self, stage: int, factors: Mapping[int, float], seconds: Sequence[OpSeconds]
    ) -> OpSeconds:
        """Return a healthy worker's op seconds in a `stage`, from the `seconds` of all workers."""
        rows = [[x / factors[w] for x in seconds[w]] for w in self._healthy_of(stage, factors)]
        return OpSeconds(*(median(column) for column in zip(*rows, strict=True)))

    def _healthy_of(self, stage: int, factors: Mapping[int, float]) -> Sequence[int]:
        """Return the healthy workers of a `stage`, by their `factors`; all if there is none."""
        line = range(stage, self.workers, self.stages)
        return [worker for worker in line if factors[worker] == 1.0] or line

    def _that_differ(
        self, links: Mapping[Path, LinkState], own: Mapping[Path, LinkState]
    ) -> Iterator[tuple[Path, LinkState]]:
        """Yield own and proven cross paths that differ from their stages' links, and lost ones."""
        cross = {path: self._cross.state(path, False) for path in self._cross.charts}
        least = THIN * self.stage_seconds()
        for path, state in {**own, **cross}.items():
            if self.proven(path):
                a, b = (worker % self.stages for worker in path)
                seconds, normally = (self._message_seconds(one) for one in (state, links[a, b]))
                if abs(seconds - normally) > max(least, RELATIVE * normally):
                    yield path, state
        for path in sorted(self._lost):
            yield path, LinkState(LONGEST)

    def _message_seconds(self, state: LinkState) -> float:
        return state.delay + self.estimators[0].message_bytes / state.bandwidth

    def state(self) -> dict[str, float]:
        """Return the seconds per link within replicas, `"1>2"`, planned for: see Estimator.

        Cross paths and slow workers are measured again within a few iterations.
        """
        each = [estimator.state() for estimator in self.estimators]
        return {link: seconds for state in each for link, seconds in state.items()}

    def settings(self) -> list[dict[str, Any]]:
        """Return the arguments of its estimators, for json.dump and `Estimator.from_settings`."""
        return [one.settings() for one in self.estimators]

    def delays(self) -> dict[str, float]:
        """Return the seconds of every path that is measured now, by `"0.1>1.2"`."""
        return {self._name(path): chart.estimate for path, chart in self.charts.items()}

    def alarms(self) -> list[str]:
        """Return the paths (`"0.1>1.2"`) and workers (`"1.2"`) whose last sample is out."""
        paths = [self._name(path) for path, chart in self.charts.items() if chart.alarm]
        return paths + self.slow_workers.alarms()

    def _name(self, path: Path) -> str:
        return ">".join(worker_name(worker, self.stages) for worker in path)


def _numbers(value: Any) -> Iterator[float]:
    """Yield all numbers in a report's `value`."""
    if isinstance(value, float | int):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _numbers(one)
    elif isinstance(value, tuple):
        for one in value:
            yield from _numbers(one)
    elif is_dataclass(value):
        yield from _numbers(vars(value))
