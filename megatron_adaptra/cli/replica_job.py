"""ReplicaConditions of a job from flags and profiles, and in words."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import number, parse_bytes, parse_rate, parse_seconds, size, whole
from megatron_adaptra.cli.once import Once
from megatron_adaptra.cli.profile import MOST_CELLS, activation_bytes_of
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import parse_worker, worker_name

_LISTS = {
    "failed": ("W,...", "workers that are dead: replica and stage, 1.2"),
    "slow": ("W:Nx,...", "workers that take N times as long: 0.1:2x"),
    "slow_replica": (
        "R:Nx,...",
        "replicas whose workers all take N times as long: 2:2x; unless --policy names another "
        "remedy, microbatches are then shared out by how fast replicas are",
    ),
    "slow_path": (
        "W-W:V,...",
        "paths between workers of adjacent stages, both ways, and what they carry: a rate, "
        "1.1-0.2:10MB/s, which needs --message-bytes, or a delay, 1.1-0.2:40ms, or both with a + "
        "between",
    ),
    "slow_port": ("W:V,...", "workers that receive, and send, so much over all paths: 0.1:10MB/s"),
    "worker_budget": (
        "W:X,...",
        "an activation budget that differs from --activation-budget: 1.2:6 or 1.2:20GiB",
    ),
}
LEAST_TIMES, MOST_TIMES = 1e-3, 1e6
_WORDS = "replica and stage, such as 1.2"
_PATH = "two workers of adjacent stages, such as 1.1-0.2"
# The first word of a field that ReplicaConditions refuses, and the key of its value.
_KEYS = {
    "failed": "failed", "slow": "slow", "path": "slow_path", "port": "slow_port",
    "ports": "slow_port", "activation_budget": "worker_budget", "chunks": "chunks",
}  # fmt: skip
MOST_NAMED = 6  # paths, ports or workers of one kind that are named
_UNPLANNED = "it is not planned across replicas yet"

Field = Callable[[str], str]


def add_replicas(parser: argparse.ArgumentParser) -> None:
    """The flags that describe several replicas."""
    group = parser.add_argument_group(
        "replicas", "pipelines that hold the same parameters and may run each other's microbatches"
    )
    text = "how many there are, at least 2; --microbatches are of each (default: one pipeline)"
    group.add_argument("--replicas", action=Once, metavar="N", help=text)
    for key, (form, words) in _LISTS.items():
        group.add_argument(_flag(key), dest=key, action="append", metavar=form, help=words)


def given_of_replicas(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of several replicas in the form of a profile; raises BadInput."""
    out: dict[str, Any] = {}
    if args.replicas is not None:
        try:
            out["replicas"] = whole(args.replicas)
        except ValueError:
            allowed = "it has to be a whole number of at least 2"
            raise BadInput("--replicas", args.replicas, allowed) from None
    for key in _LISTS:
        given = getattr(args, key)
        if given is not None:
            out[key] = [word.strip(" ") for text in given for word in text.split(",")]
    return out


def replicas_of(
    values: Mapping[str, Any], conditions: Conditions, field: Field = str
) -> ReplicaConditions | None:
    """The conditions of all workers; None for a job of one pipeline.

    Args:
        values: by the keys of a profile.
        conditions: of each replica.
        field: gives the name of a key as the user wrote it.

    Raises:
        BadInput: values that no replicas have, or that are not planned yet.
    """
    present = [key for key in _LISTS if key in values]
    if "replicas" not in values and not present:
        return None
    take = _Taker(values, conditions, field)
    count = take.count()
    take.refuse_unplanned()
    try:
        return ReplicaConditions(
            conditions,
            count,
            frozenset(worker for worker, _ in take.workers("failed")),
            take.slow(),
            take.paths(),
            {worker: take.rate("slow_port", v) for worker, v in take.workers("slow_port")},
            take.budgets(count),
        )
    except BadInput as error:
        key = _KEYS.get(error.field.split()[0])
        if key is None or error.field == field(key):
            raise
        raise BadInput(field(key), error.value, error.allowed) from None


class _Taker:
    """A taker reads values of a profile and names what is wrong with one."""

    def __init__(self, values: Mapping[str, Any], conditions: Conditions, field: Field) -> None:
        self.values, self.conditions, self.field = values, conditions, field
        self.replicas = 0

    def refusal(self, key: str, value: object, allowed: str) -> BadInput:
        return BadInput(self.field(key), value, f"it has to be {allowed}")

    def count(self) -> int:
        value = self.values.get("replicas")
        if isinstance(value, bool) or not isinstance(value, int) or value < 2:
            allowed = "a whole number of at least 2: one has no other to run its microbatches"
            raise self.refusal("replicas", value, allowed)
        c = self.conditions
        if value * c.stages * c.microbatches > MOST_CELLS:
            allowed = f"replicas x stages x microbatches may be {MOST_CELLS} at most"
            raise BadInput(self.field("replicas"), value, allowed)
        self.replicas = value
        return value

    def refuse_unplanned(self) -> None:
        c = self.conditions
        if c.chunks > 1:
            raise BadInput(self.field("chunks"), c.chunks, _UNPLANNED)
        if c.recompute:
            raise BadInput(self.field("recompute"), True, _UNPLANNED)
        if any(link.jitter for link in c.links.values()):
            raise BadInput(self.field("link_jitter"), self.values["link_jitter"], _UNPLANNED)

    def entries(self, key: str) -> Iterator[tuple[object, Any]]:
        """Give each entry's subject, such as a worker, and its value, None in a plain list."""
        given = self.values.get(key, [])
        if isinstance(given, Mapping):
            yield from given.items()
            return
        if isinstance(given, str):
            given = [word.strip(" ") for word in given.split(",")]
        for one in given if isinstance(given, (list, tuple)) else [given]:
            about, colon, value = one.partition(":") if isinstance(one, str) else (one, "", "")
            yield about, value if colon else None

    def workers(self, key: str) -> Iterator[tuple[int, Any]]:
        """Give each worker, which may be named once, and its value."""
        seen: set[int] = set()
        for about, value in self.entries(key):
            worker = self.worker(key, about)
            if worker in seen:
                raise BadInput(self.field(key), about, "it is given twice")
            seen.add(worker)
            if (value is None) != (key == "failed"):
                form = _LISTS[key][0].removesuffix(",...")
                whole_entry = about if value is None else f"{about}:{value}"
                raise self.refusal(key, whole_entry, f"of the form {form}, where W is {_WORDS}")
            yield worker, value

    def worker(self, key: str, about: object) -> int:
        """Return the number of worker `about`; YAML reads 1.2 as a float, and 1.10 as 1.1."""
        stages, text = self.conditions.stages, about
        if isinstance(about, float):
            if stages > 10:
                raise self.refusal(key, about, f"a text in a file, '{about}', not a number")
            text = repr(about)
        ends = f"replicas are 0 to {self.replicas - 1}, stages 0 to {stages - 1}"
        try:
            if not isinstance(text, str) or len(text) > 20 or not text.isascii():
                raise BadInput(key, about, "")
            worker = parse_worker(text.strip(" "), stages)
            if worker >= stages * self.replicas:
                raise BadInput(key, about, "")
        except (BadInput, ValueError):
            raise self.refusal(key, about, f"{_WORDS}; {ends}") from None
        return worker

    def slow(self) -> dict[int, float]:
        """Return how many times as long slow workers take, single ones and whole replicas'."""
        out = {worker: self.times("slow", value) for worker, value in self.workers("slow")}
        key, stages = "slow_replica", self.conditions.stages
        for about, value in self.entries(key):
            replica = self.replica(key, about)
            if value is None:
                raise self.refusal(key, about, "of the form R:Nx, where R is a replica")
            for worker in range(replica * stages, (replica + 1) * stages):
                if worker in out:
                    name = worker_name(worker, stages)
                    fault = f"how slow worker {name} is stands there already"
                    raise BadInput(self.field(key), about, fault)
                out[worker] = self.times(key, value)
        return out

    def replica(self, key: str, about: object) -> int:
        """Return the replica `about`, which is text, or a number where YAML reads it."""
        try:
            replica = whole(about) if isinstance(about, str) else about
        except ValueError:
            replica = None
        if isinstance(replica, bool) or not isinstance(replica, int):
            replica = -1
        if not 0 <= replica < self.replicas:
            raise self.refusal(key, about, f"a replica, from 0 to {self.replicas - 1}")
        return replica

    def times(self, key: str, value: Any) -> float:
        times = value
        if isinstance(value, str):
            try:
                times = number(value.strip(" ").removesuffix("x"))
            except ValueError:
                times = None
        if isinstance(times, bool) or not isinstance(times, (int, float)):
            times = math.nan
        if not LEAST_TIMES <= times <= MOST_TIMES:
            allowed = f"how many times as long, such as 2x, from {LEAST_TIMES:g} to {MOST_TIMES:g}"
            raise self.refusal(key, value, allowed)
        return float(times)

    def rate(self, key: str, value: Any) -> float:
        rate = parse_rate(value, self.field(key)) if isinstance(value, str) else math.nan
        if not rate >= 1:
            raise self.refusal(key, value, "a rate such as 10MB/s, at least 1B/s")
        return rate

    def paths(self) -> dict[tuple[int, int], LinkState]:
        key, out = "slow_path", dict[tuple[int, int], LinkState]()
        stages = self.conditions.stages
        for about, value in self.entries(key):
            ends = re.fullmatch(r"([0-9.]+)(-|>)([0-9.]+)", str(about).replace(" ", ""))
            if ends is None or not isinstance(value, str):
                entry = about if value is None else f"{about}:{value}"
                raise self.refusal(key, entry, f"{_PATH}, with :10MB/s or :40ms after it")
            one, other = (self.worker(key, ends[i]) for i in (1, 3))
            if abs(one % stages - other % stages) != 1:
                raise self.refusal(key, about, _PATH)
            ways = [(one, other)] if ends[2] == ">" else [(one, other), (other, one)]
            for way in ways:
                if way in out:
                    raise BadInput(self.field(key), about, "it is given twice")
                known = self.conditions.link(way[0] % stages, way[1] % stages)
                out[way] = self.path(known, value)
        return out

    def path(self, known: LinkState, value: str) -> LinkState:
        """Return the link `known` with the rate, the delay or both that `value` names instead."""
        key, parts = "slow_path", [part.strip(" ") for part in value.split("+")]
        rates = [part for part in parts if part.endswith("/s")]
        delays = [part for part in parts if not part.endswith("/s")]
        if len(rates) > 1 or len(delays) > 1:
            raise self.refusal(key, value, "one rate, one delay, or one of each")
        for part in rates:
            known = known._replace(bandwidth=self.rate(key, part))
        for part in delays:
            try:
                known = known._replace(delay=parse_seconds(part))
            except BadInput:
                allowed = "a rate such as 10MB/s, a delay such as 40ms, or both: 10MB/s+40ms"
                raise self.refusal(key, value, allowed) from None
        return known

    def budgets(self, replicas: int) -> tuple[float, ...]:
        key, stages = "worker_budget", self.conditions.stages
        out = list(self.conditions.activation_budget * replicas)
        unit = activation_bytes_of(self.values, stages, self.field)
        for worker, value in self.workers(key):
            out[worker] = self.budget(key, value, unit[worker % stages] if unit else None)
        return tuple(out)

    def budget(self, key: str, value: Any, unit: float | None) -> float:
        """Return a budget in microbatches; one in bytes is divided by `unit`, of a microbatch."""
        allowed = "microbatches, at least 1, or bytes such as 20GiB"
        least, budget = 1.0, value
        if isinstance(value, str):
            try:
                budget = number(value)
            except ValueError:
                if unit is None:
                    known = self.field("activation_bytes")
                    fault = f"give {known}, what one microbatch takes, or microbatches"
                    raise BadInput(self.field(key), value, fault) from None
                nbytes = parse_bytes(value, self.field(key), f"it has to be {allowed}")
                allowed = f"at least {size(unit)}, what one microbatch takes"
                budget = nbytes / unit
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget >= least:
            raise self.refusal(key, value, allowed)
        return float(budget)


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


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
