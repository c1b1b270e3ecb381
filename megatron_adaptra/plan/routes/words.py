"""Descriptions of the microbatches that replicas run for each other, in a sentence."""

from __future__ import annotations

from typing import NamedTuple

from megatron_adaptra.ir.schedule import Schedule

MOST = 6  # loads that a sentence names
MOST_TAKERS = 4  # of one load, each by name


class Load(NamedTuple):
    """A load lists microbatches of `home` that `replica` runs, at stages `first` to `last`."""

    home: int
    replica: int
    first: int
    last: int
    microbatches: tuple[int, ...]


def loads(schedule: Schedule) -> list[Load]:
    """Return the loads of `schedule`; adjacent stages with all of a home alike are one load."""
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
    """Describe the loads of a `schedule`, the greatest first; empty where all run at home."""
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
    """Describe how many of one replica's microbatches which others take, at the same stages."""
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
    """Name a replica, or those of its stages that a `load` is about."""
    if load.first == load.last:
        return f"worker {replica}.{load.first}"
    if (load.first, load.last) == (0, schedule.stages - 1):
        return f"replica {replica}"
    return f"stages {load.first} to {load.last} of replica {replica}"
