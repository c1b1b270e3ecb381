"""The rules of `--slow`: they become conditions of a pipeline, or of several replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import number, parse_bytes, size
from megatron_adaptra.cli.profile import MOST_CELLS, activation_bytes_of
from megatron_adaptra.emulate.rules import parse_port_rules, parse_rules
from megatron_adaptra.emulate.slow import (
    DEAD,
    LATE,
    LINK,
    PORT,
    REPLICA,
    WORKER,
    sorted_rules,
)
from megatron_adaptra.emulate.worker_rules import parse_slowness
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import parse_worker

MOST_NAMED = 6  # paths, ports or workers of one kind that are named
_UNPLANNED = "it is not planned across replicas yet"
_SEVERAL = "it needs several replicas: give --replicas"

Field = Callable[[str], str]


def slow_replicas(values: Mapping[str, Any], field: Field = str) -> bool:
    """Return whether the rules in `values` name whole replicas.

    `field`: gives the name of a key as the user wrote it. Raises BadInput.
    """
    return bool(_slow_rules(values, field)[REPLICA])


def slow_conditions(
    values: Mapping[str, Any], conditions: Conditions, field: Field = str
) -> tuple[Conditions, ReplicaConditions | None]:
    """Return the conditions of each pipeline, and those of all workers where there are several.

    Args:
        values: by the keys of a profile; of them `replicas`, `slow` and `worker_budget` are read.
        conditions: of each replica, while nothing else is slow.
        field: gives the name of a key as the user wrote it.

    Raises:
        BadInput: rules that fit no such job, or are not planned yet.
    """
    return _Job(values, conditions, field).conditions()


def rules_of(values: Mapping[str, Any], field: Field = str) -> list[str]:
    """Return the rules under `slow` in `values`; raises BadInput."""
    given = values.get("slow", [])
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, str) for one in given):
        raise BadInput(field("slow"), given, "it has to be a list of rules such as 2-3:40ms")
    return list(given)


def _slow_rules(values: Mapping[str, Any], field: Field) -> dict[str, list[str]]:
    """Return the rules under `slow` in `values`, by kind; a plan is of when they hold."""
    return sorted_rules(rules_of(values, field), field("slow"))


class _Job:
    """A job holds the values of a profile, and names what is wrong with one."""

    def __init__(self, values: Mapping[str, Any], pipeline: Conditions, field: Field) -> None:
        self.values, self.pipeline, self.field = values, pipeline, field
        self.slow = field("slow")
        self.rules = _slow_rules(values, field)
        self.replicas = self._replicas()
        self.workers = pipeline.stages * self.replicas
        for text in self.rules[LATE]:
            allowed = "no plan of pipelines knows late ranks; adaptra demo has them"
            raise BadInput(self.slow, text, allowed)

    def conditions(self) -> tuple[Conditions, ReplicaConditions | None]:
        links, times, ports, dead = self._links(), self._times(), self._ports(), self._dead()
        if self.replicas == 1:
            if "worker_budget" in self.values:
                raise BadInput(self.field("worker_budget"), self.values["worker_budget"], _SEVERAL)
            known = self.pipeline

            def scaled(seconds: tuple[float, ...]) -> tuple[float, ...]:
                return tuple(one * times.get(stage, 1.0) for stage, one in enumerate(seconds))

            return replace(
                known,
                forward=scaled(known.forward),
                backward_input=scaled(known.backward_input),
                backward_weight=scaled(known.backward_weight),
                links={**known.links, **links},
                ports={**known.ports, **ports},
            ), None
        self._refuse_unplanned(links)
        try:
            return self.pipeline, ReplicaConditions(
                self.pipeline, self.replicas, dead, times, links, ports, self._budgets()
            )
        except BadInput as error:
            key = error.field.split()[0]
            if key not in ("failed", "slow", "path", "port", "ports", "activation_budget"):
                raise
            key = "worker_budget" if key == "activation_budget" else "slow"
            raise BadInput(self.field(key), error.value, error.allowed) from None

    def _replicas(self) -> int:
        value = self.values.get("replicas", 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            allowed = "it has to be a whole number of at least 1"
            raise BadInput(self.field("replicas"), value, allowed)
        c = self.pipeline
        if value * c.stages * c.microbatches > MOST_CELLS:
            allowed = f"replicas x stages x microbatches may be {MOST_CELLS} at most"
            raise BadInput(self.field("replicas"), value, allowed)
        return value

    def _refuse_unplanned(self, links: Mapping[tuple[int, int], LinkState]) -> None:
        c = self.pipeline
        if c.chunks > 1:
            raise BadInput(self.field("chunks"), c.chunks, _UNPLANNED)
        if c.recompute:
            raise BadInput(self.field("recompute"), True, _UNPLANNED)
        if any(link.jitter for link in c.links.values()):
            raise BadInput(self.field("link_jitter"), self.values["link_jitter"], _UNPLANNED)
        if any(link.jitter for link in links.values()):
            raise BadInput(self.slow, "jitter", _UNPLANNED)

    def _links(self) -> dict[tuple[int, int], LinkState]:
        stages, out = self.pipeline.stages, dict[tuple[int, int], LinkState]()
        ring = self.pipeline.chunks > 1
        for text in self.rules[LINK]:
            for rule in parse_rules(text, stages, self.slow, ring, self.replicas):
                if rule.loss:
                    raise BadInput(self.slow, text, "loss needs a network: see adaptra netlab")
                way = rule.source, rule.target
                known = self.pipeline.link(way[0] % stages, way[1] % stages)
                if ring and way not in self.pipeline.links:
                    raise BadInput(self.slow, text, f"no such link of {stages} stages")
                self._once(way in out, text)
                out[way] = LinkState(rule.delay, rule.bandwidth, rule.jitter)
                if rule.bandwidth == math.inf:
                    out[way] = out[way]._replace(bandwidth=known.bandwidth)
                elif not rule.delay:
                    out[way] = known._replace(bandwidth=rule.bandwidth)
        return out

    def _times(self) -> dict[int, float]:
        """Return how many times as long slow workers take, single ones and whole replicas'."""
        stages, out = self.pipeline.stages, dict[int, float]()
        texts = [(text, text) for text in self.rules[WORKER]]
        for text in self.rules[REPLICA]:
            replica, _, times = text.partition(":")
            if self.replicas == 1:
                raise BadInput(self.slow, text, _SEVERAL)
            texts += [(text, f"{replica}.{stage}:{times}") for stage in range(stages)]
        for text, each in texts:
            try:
                (rule,) = parse_slowness(each, stages, self.replicas, self.slow)
            except BadInput as error:
                raise BadInput(self.slow, text, error.allowed) from None
            self._once(rule.worker in out, text)
            out[rule.worker] = rule.times
        return out

    def _ports(self) -> dict[int, float]:
        out: dict[int, float] = {}
        for text in self.rules[PORT]:
            about, _, rate = text.partition(":")
            which = "all" if about == "all" else str(self._worker(text))
            for rule in parse_port_rules(f"{which}:{rate}", self.workers, self.slow):
                self._once(rule.host in out, text)
                out[rule.host] = rule.rate
        return out

    def _dead(self) -> frozenset[int]:
        out: set[int] = set()
        for text in self.rules[DEAD]:
            if self.replicas == 1:
                raise BadInput(self.slow, text, _SEVERAL)
            worker = self._worker(text)
            self._once(worker in out, text)
            out.add(worker)
        return frozenset(out)

    def _once(self, again: bool, text: str) -> None:
        if again:
            raise BadInput(self.slow, text, "it is given twice")

    def _worker(self, text: str, key: str = "slow") -> int:
        """Return the number of the worker that the rule `text` begins with."""
        about = text.partition(":")[0]
        ends = f"workers are 0.0 to {self.replicas - 1}.{self.pipeline.stages - 1}, replica.stage"
        try:
            worker = parse_worker(about, self.pipeline.stages) if about.isascii() else self.workers
        except (BadInput, ValueError):
            worker = self.workers
        if worker >= self.workers:
            raise BadInput(self.field(key), text, f"no such worker; {ends}")
        return worker

    def _budgets(self) -> tuple[float, ...]:
        key, stages = "worker_budget", self.pipeline.stages
        out = list(self.pipeline.activation_budget * self.replicas)
        unit = activation_bytes_of(self.values, stages, self.field)
        for text, value in self._entries(key):
            worker = self._worker(text, key)
            out[worker] = self._budget(key, value, unit[worker % stages] if unit else None)
        return tuple(out)

    def _entries(self, key: str) -> Iterator[tuple[str, Any]]:
        """Give each entry of a mapping, or of texts with a colon: its subject, and its value."""
        given = self.values.get(key, [])
        if isinstance(given, str):
            given = given.split(",")
        if isinstance(given, Mapping):
            yield from ((str(about), value) for about, value in given.items())
            return
        for one in given if isinstance(given, (list, tuple)) else [given]:
            about, colon, value = str(one).partition(":")
            if not colon:
                raise BadInput(self.field(key), one, "it has to be of the form 1.2:6")
            yield about.strip(" "), value.strip(" ")

    def _budget(self, key: str, value: Any, unit: float | None) -> float:
        """Return a budget in microbatches; one in bytes is divided by `unit`, of a microbatch."""
        refusal = partial(BadInput, self.field(key), value)
        allowed = "microbatches, at least 1, or bytes such as 20GiB"
        budget = value
        if isinstance(value, str):
            try:
                budget = number(value)
            except ValueError:
                if unit is None:
                    known = self.field("activation_bytes")
                    fault = f"give {known}, what one microbatch takes, or microbatches"
                    raise refusal(fault) from None
                nbytes = parse_bytes(value, self.field(key), f"it has to be {allowed}")
                allowed = f"at least {size(unit)}, what one microbatch takes"
                budget = nbytes / unit
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget >= 1:
            raise refusal(f"it has to be {allowed}")
        return float(budget)


def replicas_in_words(conditions: ReplicaConditions) -> str:
    """Describe what is unusual about the workers, for titles; empty where all are alike.

    `conditions`: of all workers.
    """
    c, parts = conditions, []
    if c.failed:
        parts.append(f"{_workers([c.name(w) for w in sorted(c.failed)])} dead")
    times: dict[float, list[str]] = {}
    for worker, each in sorted(c.slow.items()):
        times.setdefault(each, []).append(c.name(worker))
    parts += [f"{_workers(names)} {each:g}x slow" for each, names in sorted(times.items())]
    seen: dict[str, str] = {}
    for (source, target), link in sorted(c.paths.items()):
        both = c.paths.get((target, source)) == link
        if both and source > target:
            continue
        name = f"{c.name(source)}{'-' if both else '>'}{c.name(target)}"
        limits = [f"at {rate(link.bandwidth)}"] if math.isfinite(link.bandwidth) else []
        limits += [f"{1e3 * link.delay:g} ms later"] if link.delay else []
        seen[name] = " and ".join(limits) or "healthy"
    parts += [f"path {name} {limit}" for name, limit in list(seen.items())[:MOST_NAMED]]
    if len(seen) > MOST_NAMED:
        parts.append(f"{len(seen) - MOST_NAMED} more paths slow")
    parts += [
        f"port of {c.name(w)} at {rate(each)}" for w, each in sorted(c.ports.items())[:MOST_NAMED]
    ]
    return ", ".join(parts)


def rate(bandwidth: float) -> str:
    """`bandwidth`, bytes per second, as text."""
    return f"{size(bandwidth)}/s"


def _workers(names: list[str]) -> str:
    if len(names) > MOST_NAMED:
        return f"{len(names)} workers"
    return f"worker{'s' * (len(names) > 1)} {', '.join(names)}"
