"""Bundles of values by kind, which come into force together at one boundary, or not at all."""

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
    """A value holds plain data, the same on every rank."""

    def to_json(self) -> Any:
        """Return the value as json.dump takes it; equal values give equal text."""


V = TypeVar("V", bound=Value)


@dataclass(frozen=True, eq=False)
class ValueKind(Generic[V]):
    """A value kind reads and checks the values of one `name`.

    `read`: makes the value from what `to_json` gave; raises BadInput or ValueError. `check`: takes
    a value and the one in force; raises an AdaptraError for one that must not follow it.
    """

    name: str
    read: Callable[[object], V]
    check: Callable[[V, V], None]


def _check_schedule(schedule: Schedule, now: Schedule) -> None:
    """Raise BadBundle for a schedule of another shape, ScheduleError for one that cannot run."""
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
    """A bundle holds `values` by kind, and never changes.

    A bundle in force has a value of every kind that the job knows; a proposed one has those that
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
        """All values, as the JSON text that ranks send."""
        found = {kind.name: value.to_json() for kind, value in self.values.items()}
        return json.dumps(found, sort_keys=True)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `text`: ranks with equal digests have equal values of the same kinds."""
        return digest_of(self.text)

    def replaced_by(self, other: Bundle) -> Bundle:
        """Return these values, but those of `other` for the kinds that it has."""
        return Bundle({**self.values, **other.values})

    def read(self, text: str) -> Bundle:
        """Return the bundle of a `text`, which may replace values of this one.

        Raises BadBundle where it is damaged or has a kind that is not here, and the AdaptraError
        that the check of a kind raises.
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
    """Compute the SHA-256 of the `text` of a bundle, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def scheduled(schedule: Schedule) -> Bundle:
    """Make a bundle of a `schedule` alone."""
    return Bundle({SCHEDULE: schedule})


@dataclass(frozen=True)
class Links(Value):
    """A set of links connects workers of different replicas, besides the links within each.

    `pairs`: of workers, the lower one first.
    """

    pairs: frozenset[tuple[int, int]] = frozenset()

    def to_json(self) -> Any:
        return sorted(map(list, self.pairs))

    @classmethod
    def from_json(cls, data: object) -> Links:
        """Make links from `data`: JSON that `to_json` has made. Raises BadInput."""
        with reading("links", data):
            pairs = frozenset((int(a), int(b)) for a, b in data)  # type: ignore[attr-defined]
        if any(not 0 <= a < b for a, b in pairs):
            raise BadInput("links", data, "two workers each, the lower one first")
        return cls(pairs)

    def of(self, worker: int) -> list[int]:
        """Return the workers that `worker` is connected with."""
        return sorted(b if a == worker else a for a, b in self.pairs if worker in (a, b))


LINKS = ValueKind("links", Links.from_json, lambda links, now: None)
