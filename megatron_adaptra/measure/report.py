"""The report of one worker on one iteration: to the leader, in a run's record, for a replay.

The fields of `StageReport` are the format: `to_json` writes them, and `from_json` reads nothing
else. A report of another VERSION is refused, never guessed at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from megatron_adaptra.base.errors import BadMessage
from megatron_adaptra.measure.link_fit import Sample
from megatron_adaptra.measure.port_use import PortUse

VERSION = 9
_LONGEST = 40  # characters of a value in an error
R = TypeVar("R")


@dataclass(frozen=True)
class Memory:
    """A measurement of memory holds what one iteration's activations took on one stage.

    `peak`: microbatches in flight, as they were counted; `peak_bytes`: None where bytes were not
    counted; `per_microbatch`: bytes of one microbatch of all the stage's layers, 0 if not counted;
    `free`: bytes that the device had left besides, None if not asked; `pinned`: bytes of the host,
    through which a device's messages go.
    """

    peak: float
    peak_bytes: int | None = None
    per_microbatch: int = 0
    free: int | None = None
    pinned: int = 0


class Collective(NamedTuple):
    """A collective holds the `seconds` of one in the step; other fields: see CollectiveSpan."""

    name: str
    seconds: float
    backend: float
    direct: float
    stages: tuple[int, ...]
    kept: bool


@dataclass(frozen=True)
class Step:
    """A step records what followed the last op of an iteration. `seconds`: of all of it."""

    seconds: float
    collectives: tuple[Collective, ...] = ()


class StockOp(NamedTuple):
    """A stock op holds an op over Megatron's messages; `op`: its text; others: see OpTime."""

    op: str
    start: float
    end: float
    asked: float
    lag: float


class OpAlone(NamedTuple):
    """An op alone holds `wall`, `cpu` and `idle` of a StageReport without what was beside the op.

    That is waiting for batches and collecting garbage. `idle`: 0 where it is not known.
    """

    wall: float
    cpu: float
    idle: float


@dataclass(frozen=True)
class LinkSample:
    """A link sample holds what came from one worker in an iteration; see link_delay for seconds.

    `delay`, `delay_p25`, `transit`, `ahead`: of messages of ops; None where none came. `probed`:
    the transit of a small message that only measures the link; None where none came. `busy`: how
    long larger messages kept the link busy, see `transmissions`; empty where none was probed.
    `through`: what messages go through here, see Wire.
    """

    delay: float | None = None
    delay_p25: float | None = None
    transit: float | None = None
    ahead: float | None = None
    probed: float | None = None
    busy: tuple[Sample, ...] = ()
    through: str = ""


@dataclass(frozen=True)
class StageReport:
    """A stage report holds seconds by kind of op (`F`), and `links` by where messages came from.

    Workers, `worker` among them, are numbered as in `ir.routes`: those of one pipeline by stage.

    `wall` are medians, `cpu`, `queued` (waiting for a core) and `idle` (neither waiting for one nor
    on one) are means; the last two are empty where they are not known. `overhead`: CPU seconds of
    the process per CPU second of its ops. `starved`: see IterationRecord. `port`: what large
    messages of several sources show of the port; None where there is one source. `ops`: its ops
    where Megatron's own messages were used, else None. `memory`: None where nothing
    was counted. `step`, `seconds`: the step and the whole of the iteration before, since this one
    has not ended when it is reported; None where they are not known. `met`: how its ops have met
    ranks that may be at other ops; "" where they have not. `loading`, `collecting`: the seconds
    that the iteration before waited for batches, but not for a core, and CPU seconds of its garbage
    collections; None where it has read no batch, and where they are not known. `alone`: by kind of
    op, where ops have done either. `layers`: equal on stages that run the same; "" if unknown.
    """

    worker: int
    iteration: int
    wall: Mapping[str, float]
    cpu: Mapping[str, float]
    overhead: float
    links: Mapping[int, LinkSample]
    starved: float
    port: PortUse | None = None
    memory: Memory | None = None
    ops: tuple[StockOp, ...] | None = None
    step: Step | None = None
    seconds: float | None = None
    queued: Mapping[str, float] = field(default_factory=dict)
    idle: Mapping[str, float] = field(default_factory=dict)
    met: str = ""
    loading: float | None = None
    collecting: float | None = None
    alone: Mapping[str, OpAlone] = field(default_factory=dict)
    layers: str = ""

    def of_ops_alone(self) -> StageReport:
        """Return the report as if no op had waited for batches, or collected garbage."""
        if not self.alone:
            return self
        wall = {kind: op.wall for kind, op in self.alone.items()}
        cpu = {kind: op.cpu for kind, op in self.alone.items()}
        idle = {kind: op.idle for kind, op in self.alone.items()} if self.idle else {}
        return replace(
            self, wall={**self.wall, **wall}, cpu={**self.cpu, **cpu}, idle={**self.idle, **idle}
        )

    def to_json(self) -> dict[str, Any]:
        """Return an object for json.dump, which `from_json` reads."""
        # Not `asdict`, which copies every number of every op.
        memory, step = self.memory and vars(self.memory), self.step and vars(self.step)
        links = {source: vars(link) for source, link in self.links.items()}
        known = {"links": links, "memory": memory, "step": step}
        return {"version": VERSION, **vars(self), **known}

    @classmethod
    def from_json(cls, data: object) -> StageReport:
        """Return the report of which `to_json` made `data`, which has been through JSON.

        Raises BadMessage where a field is missing, unknown or of another type, where a number is
        not finite, and for another version.
        """
        return read_report(cls, data, VERSION)


def read_report(cls: type[R], data: object, version: int) -> R:
    """Return the object of the dataclass `cls`, of this `version`, that `data` from JSON holds.

    Raises BadMessage as StageReport.from_json.
    """
    if not isinstance(data, Mapping):
        raise BadMessage(f"a report is an object, not {_short(data)}")
    if (theirs := data.get("version")) != version or type(theirs) is not int:
        raise BadMessage(f"a report of version {_short(theirs)}; this one reads {version}")
    known = {key: value for key, value in data.items() if key != "version"}
    return cast(R, _reader(cast(Any, cls), "report")(known))


@cache
def _reader(hint: Any, name: str) -> Callable[[Any], Any]:
    """Return a function from JSON's values to the type `hint`; `name`: of the value, in errors.

    Made once per type and name: a report of Megatron's own messages has a row per op.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (inner,) = (_reader(part, name) for part in parts if part is not NoneType)
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        return _list_of(_reader(parts[0], name), name)
    if origin is not None:
        return _mapping(parts[0], _reader(parts[1], name), name)
    if is_dataclass(hint):
        return _object(hint, name)
    if issubclass(hint, tuple):
        return _row(hint, name)
    return _number(name) if hint is float else _plain(hint, name)


def _number(name: str) -> Callable[[Any], Any]:
    most = sys.float_info.max

    def read(value: Any) -> Any:
        _expect(type(value) in (float, int) and -most <= value <= most, name, value)
        return value

    return read


def _plain(kind: type, name: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        _expect(type(value) is kind, name, value)
        return value

    return read


def _list_of(each: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        _expect(isinstance(value, (list, tuple)), name, value)
        return tuple([each(one) for one in value])

    return read


def _row(hint: Any, name: str) -> Callable[[Any], Any]:
    """Return the reader of a NamedTuple, which is a list in JSON."""
    readers = [_reader(kind, f"{name}.{key}") for key, kind in get_type_hints(hint).items()]

    def read(value: Any) -> Any:
        _expect(isinstance(value, (list, tuple)) and len(value) == len(readers), name, value)
        return hint._make([each(one) for each, one in zip(readers, value, strict=True)])

    return read


def _mapping(key: type, each: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    """Return the reader of a mapping, whose keys are text in JSON even where they are numbers."""

    def key_of(found: Any) -> Any:
        if key is int and isinstance(found, str) and found.isascii() and found.isdigit():
            return int(found)
        _expect(type(found) is key, name, found)
        return found

    def read(value: Any) -> Any:
        _expect(isinstance(value, Mapping), name, value)
        return {key_of(found): each(one) for found, one in value.items()}

    return read


def _object(cls: Any, name: str) -> Callable[[Any], Any]:
    readers = {key: _reader(kind, key) for key, kind in get_type_hints(cls).items()}

    def read(data: Any) -> Any:
        _expect(isinstance(data, Mapping), name, data)
        if unknown := data.keys() - readers.keys():
            raise BadMessage(f"{name} has {_short(min(map(str, unknown)))}, which is unknown here")
        if missing := [key for key in readers if key not in data]:
            raise BadMessage(f"{name} lacks {missing[0]}")
        return cls(**{key: readers[key](value) for key, value in data.items()})

    return read


def _expect(fits: bool, name: str, value: object) -> None:
    if not fits:
        raise BadMessage(f"{name} of a report cannot be {_short(value)}")


def _short(value: object) -> str:
    return repr(value)[:_LONGEST]
