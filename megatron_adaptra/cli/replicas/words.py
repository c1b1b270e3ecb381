"""What a schedule of several replicas does, in words and figures."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule

MOST = 6  # loads that a sentence names
MOST_TAKERS = 4  # of one load, each by name
_HEADS = {
    "none": "nothing is moved",
    "swap": "swap partners",
    "shift": "shift whole microbatches",
    "re-route": "re-route single stages of microbatches",
}


class Load(NamedTuple):
    """Microbatches that one replica runs for another, the same at all stages from first to last."""

    home: int
    replica: int
    first: int
    last: int
    microbatches: tuple[int, ...]


def loads(schedule: Schedule) -> list[Load]:
    """Who runs what for whom in `schedule`; stages at which all of a home is alike are one load."""
    away: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
    for (stage, home, microbatch), replica in sorted(schedule.routes.moved.items()):
        one = away.setdefault((home, stage), {})
        one[replica] = (*one.get(replica, ()), microbatch)
    out: list[Load] = []
    for (home, first), one in sorted(away.items()):
        if away.get((home, first - 1)) == one:
            continue
        last = first
        while away.get((home, last + 1)) == one:
            last += 1
        out += [Load(home, replica, first, last, which) for replica, which in sorted(one.items())]
    return out


def loads_in_words(schedule: Schedule) -> str:
    """The loads of a `schedule` in a sentence, the greatest first; empty where all run at home."""
    found, parts = loads(schedule), list[tuple[int, str]]()
    while found:
        first = found.pop(0)
        back = first._replace(home=first.replica, replica=first.home)
        if back in found and len(first.microbatches) == schedule.microbatches:
            found.remove(back)
            names = (_name(one, first, schedule) for one in (first.home, first.replica))
            text = f"{' and '.join(names)} run each other's microbatches"
            parts.append((2 * len(first.microbatches), text))
            continue
        alike = [one for one in found if (one.home, *one[2:4]) == (first.home, *first[2:4])]
        found = [one for one in found if one not in alike]
        some = [first, *alike]
        parts.append((sum(len(one.microbatches) for one in some), _taken(some, schedule)))
    parts.sort(key=lambda part: -part[0])
    words = [text for _, text in parts[:MOST]]
    words += [f"and {len(parts) - MOST} more such moves"] * (len(parts) > MOST)
    return "; ".join(words)


def _taken(some: list[Load], schedule: Schedule) -> str:
    """Who takes how many of one replica's microbatches, at the same stages."""
    home, _, first, last, _ = some[0]
    counts, one_stage = [len(one.microbatches) for one in some], first == last
    total, whose = schedule.microbatches, _name(home, some[0], schedule)
    noun = "worker" if one_stage else "replica"
    names = [f"{one.replica}.{first}" if one_stage else f"{one.replica}" for one in some]
    if counts == [total]:
        return f"all {total} microbatches of {whose} run on {noun} {names[0]}"
    count = f"of the {total} microbatches of {whose}, {sum(counts)} run{'s' * (sum(counts) == 1)}"
    if sum(counts) == total:
        count = f"all {total} microbatches of {whose} run"
    if len(some) > MOST_TAKERS:
        least, most = min(counts), max(counts)
        each = f"{least}" if least == most else f"{least} to {most}"
        return f"{count} on {len(some)} peers, {each} on each"
    if len(some) == 1:
        return f"{count} on {noun} {names[0]}"
    pairs = zip(counts[1:], names[1:], strict=True)
    taken = [f"{counts[0]} on {noun} {names[0]}", *(f"{n} on {name}" for n, name in pairs)]
    return f"{count} elsewhere, {', '.join(taken)}"


def _name(replica: int, load: Load, schedule: Schedule) -> str:
    """A replica, or those of its stages that a `load` is about."""
    if load.first == load.last:
        return f"worker {replica}.{load.first}"
    if (load.first, load.last) == (0, schedule.stages - 1):
        return f"replica {replica}"
    return f"stages {load.first} to {load.last} of replica {replica}"


def decision(move: str, schedule: Schedule) -> str:
    """Which `move` the `schedule` makes, and who takes what from whom, in one sentence."""
    words = loads_in_words(schedule)
    return f"{move}: {words or _HEADS.get(move, 'nothing is moved')}"


def in_table(move: str) -> str:
    """The name of a `move`, for tables and pictures."""
    return "none, best order" if move == "none" else move


def between_replicas(schedule: Schedule) -> int:
    """Messages of an iteration that go from one replica to another: two where a route crosses."""
    routes, crossing = schedule.routes, 0
    for home in range(schedule.replicas):
        for microbatch in range(schedule.microbatches):
            at = [routes.worker(stage, microbatch, home) for stage in range(schedule.stages)]
            replicas = [worker // schedule.stages for worker in at]
            crossing += sum(one != other for one, other in pairwise(replicas))
    return 2 * crossing


def runs_for_others(schedule: Schedule) -> list[int]:
    """Per worker, the microbatches of other replicas that it runs in `schedule`."""
    count = Counter(
        worker
        for worker, line in enumerate(schedule.order)
        for op in line
        if op.kind is Kind.F and op.home != worker // schedule.stages
    )
    return [count[worker] for worker in range(len(schedule.order))]


def one_f_one_b_peaks(conditions: ReplicaConditions) -> list[float]:
    """Per worker, the microbatches that 1F1B holds in flight.

    `conditions`: of all workers.
    """
    stages, count = conditions.stages, conditions.microbatches
    return [float(min(stages - w % stages, count)) for w in range(conditions.workers)]
