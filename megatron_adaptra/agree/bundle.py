"""What changes together: values by kind, which come into force at one boundary, or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar, cast

from megatron_adaptra.base.errors import BadBundle, BadInput, reading
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule


class Value(Protocol):
    """Plain data, the same on every rank."""

    def to_json(self) -> Any:
        """As json.dump takes it; equal values give equal text."""
        ...


V = TypeVar("V", bound=Value)


@dataclass(frozen=True, eq=False)
class ValueKind(Generic[V]):
    """A kind of value, by `name`.

    `read`: makes the value from what `to_json` gave; raises BadInput or ValueError. `check`: of a
    value, and of the one in force: raises an AdaptraError for one that must not follow it.
    """

    name: str
    read: Callable[[object], V]
    check: Callable[[V, V], None]


def _check_schedule(schedule: Schedule, now: Schedule) -> None:
    """Of the same shape, and able to finish. Raises BadBundle or ScheduleError."""
    theirs, ours = ((s.stages, s.microbatches, s.replicas) for s in (schedule, now))
    if theirs != ours:
        raise BadBundle(f"it is for {_shape(*theirs)}; here are {_shape(*ours)}")
    check(lower(schedule))


def _shape(stages: int, microbatches: int, replicas: int) -> str:
    together = f" in {replicas} replicas" if replicas > 1 else ""
    return f"{stages} stages and {microbatches} microbatches{together}"


SCHEDULE = ValueKind("schedule", Schedule.from_json, _check_schedule)


@dataclass(frozen=True)
class Bundle:
    """`values` by kind. Never changed: who holds one has all of it, or another one.

    What is in force has a value of every kind that the job knows; what is proposed has those that
    are to change.
    """

    values: Mapping[ValueKind[Any], Value]

    def __getitem__(self, kind: ValueKind[V]) -> V:
        return cast(V, self.values[kind])

    @property
    def names(self) -> list[str]:
        """The names of its kinds, in order."""
        return sorted(kind.name for kind in self.values)

    @cached_property
    def text(self) -> str:
        """All values, as they travel."""
        found = {kind.name: value.to_json() for kind, value in self.values.items()}
        return json.dumps(found, sort_keys=True)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `text`: ranks with equal digests have equal values of the same kinds."""
        return digest_of(self.text)

    def replaced_by(self, other: Bundle) -> Bundle:
        """These values, but those of `other` where it has one."""
        return Bundle({**self.values, **other.values})

    def read(self, text: str) -> Bundle:
        """The bundle of a `text`, which may replace values of this one.

        Raises BadBundle where it is damaged or has a kind that is not here, and what the check of a
        kind raises, an AdaptraError.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadBundle(f"it is no JSON: {str(error)[:80]}") from error
        kinds = {kind.name: kind for kind in self.values}
        if not isinstance(found, dict) or not found or found.keys() - kinds.keys():
            what = list(found) if isinstance(found, dict) else found
            raise BadBundle(f"it has {str(what)[:80]}, here are {', '.join(kinds)}")
        values: dict[ValueKind[Any], Value] = {}
        for name, data in found.items():
            try:
                value = kinds[name].read(data)
            except (BadInput, ValueError, RecursionError) as error:
                raise BadBundle(f"its {name} is none: {str(error)[:80]}") from error
            kinds[name].check(value, self[kinds[name]])
            values[kinds[name]] = value
        return Bundle(values)


def digest_of(text: str) -> str:
    """SHA-256 of the `text` of a bundle, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def scheduled(schedule: Schedule) -> Bundle:
    """A bundle of a `schedule` alone."""
    return Bundle({SCHEDULE: schedule})


@dataclass(frozen=True)
class Links(Value):
    """Which workers of different replicas are connected, besides those of each replica.

    `pairs`: of workers, the lower one first.
    """

    pairs: frozenset[tuple[int, int]] = frozenset()

    def to_json(self) -> Any:
        return sorted(map(list, self.pairs))

    @classmethod
    def from_json(cls, data: object) -> Links:
        """What `to_json` has made of links: `data`, read from JSON. Raises BadInput."""
        with reading("links", data):
            pairs = frozenset((int(a), int(b)) for a, b in data)  # type: ignore[attr-defined]
        if any(not 0 <= a < b for a, b in pairs):
            raise BadInput("links", data, "two workers each, the lower one first")
        return cls(pairs)

    def of(self, worker: int) -> list[int]:
        """Whom `worker` is connected with."""
        return sorted(b if a == worker else a for a, b in self.pairs if worker in (a, b))


LINKS = ValueKind("links", Links.from_json, lambda links, now: None)
