"""What one stage reports of one iteration: to the leader, in the record of a run, to a replay.

The fields of `StageReport` are the format: `to_json` writes them, and `from_json` reads nothing
else. A report of another VERSION is refused, never guessed at.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from megatron_adaptra.errors import BadMessage

VERSION = 1
_LONGEST = 40  # characters of a value in an error

T = TypeVar("T")


@dataclass(frozen=True)
class Memory:
    """What one iteration's activations took on one stage.

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
    """A collective of the step: see CollectiveSpan. `seconds`: what it took."""

    name: str
    seconds: float
    backend: float
    direct: float
    stages: tuple[int, ...]
    kept: bool


@dataclass(frozen=True)
class Step:
    """What followed the last op of an iteration. `seconds`: of all of it."""

    seconds: float
    collectives: tuple[Collective, ...] = ()


class StockOp(NamedTuple):
    """An op over Megatron's own messages, with the moments of an OpTime. `op`: its text form."""

    op: str
    start: float
    end: float
    asked: float
    lag: float


@dataclass(frozen=True)
class StageReport:
    """Seconds everywhere; by kind of op (`F`), or by the stage that messages came from.

    `overhead`: CPU seconds of the process per CPU second of its ops. `delay`, `delay_p25`,
    `transit`, `ahead`, `starved`: see IterationRecord. `probed`: delays of what was sent only to
    measure a link. `ops`: where Megatron's own messages were used. `memory`: None where nothing was
    counted. `step`, `seconds`: the step and the whole of the iteration before this one, which has
    not ended when it is reported; None where they are not known.
    """

    stage: int
    iteration: int
    wall: Mapping[str, float]
    cpu: Mapping[str, float]
    overhead: float
    delay: Mapping[int, float]
    delay_p25: Mapping[int, float]
    transit: Mapping[int, float]
    ahead: Mapping[int, float]
    starved: float
    probed: Mapping[int, float]
    memory: Memory | None = None
    ops: tuple[StockOp, ...] | None = None
    step: Step | None = None
    seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """An object for json.dump, which `from_json` reads."""
        # Not `asdict`, which copies every number of every op.
        memory, step = self.memory and vars(self.memory), self.step and vars(self.step)
        return {"version": VERSION, **vars(self), "memory": memory, "step": step}

    @classmethod
    def from_json(cls, data: object) -> StageReport:
        """The report that `to_json` has made `data` of, on its way through JSON.

        Raises BadMessage where a field is missing, unknown or of another type, where a number is
        not finite, and for another version.
        """
        if not isinstance(data, Mapping):
            raise BadMessage(f"a report is an object, not {_short(data)}")
        if (version := data.get("version")) != VERSION or type(version) is not int:
            raise BadMessage(f"a report of version {_short(version)}; this one reads {VERSION}")
        return _object(cls, {k: v for k, v in data.items() if k != "version"}, "report")


def _read(hint: Any, value: Any, name: str) -> Any:
    """`value`, as JSON has it, as what the type `hint` says; `name`: of it, in errors."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        rest = [part for part in parts if part is not NoneType]
        return None if value is None else _read(rest[0], value, name)
    if origin is tuple:
        _expect(isinstance(value, (list, tuple)), name, value)
        return tuple(_read(parts[0], one, name) for one in value)
    if isinstance(hint, type) and is_dataclass(hint):
        return _object(hint, value, name)
    if isinstance(hint, type) and issubclass(hint, tuple):
        types = _hints(hint)
        _expect(isinstance(value, (list, tuple)) and len(value) == len(types), name, value)
        row = zip(types.items(), value, strict=True)
        return hint(*(_read(kind, one, f"{name}.{key}") for (key, kind), one in row))
    if origin is not None:  # a mapping
        _expect(isinstance(value, Mapping), name, value)
        return {_key(parts[0], k, name): _read(parts[1], v, name) for k, v in value.items()}
    if hint is float:
        _expect(type(value) in (int, float) and abs(value) <= sys.float_info.max, name, value)
        return value
    _expect(type(value) is hint, name, value)
    return value


def _object(cls: type[T], data: Any, name: str) -> T:
    _expect(isinstance(data, Mapping), name, data)
    types = _hints(cast(Any, cls))
    if unknown := data.keys() - types.keys():
        raise BadMessage(f"{name} has {_short(min(map(str, unknown)))}, which is unknown here")
    if missing := [f.name for f in fields(cls) if f.name not in data]:  # type: ignore[arg-type]
        raise BadMessage(f"{name} lacks {missing[0]}")
    return cls(**{key: _read(types[key], value, key) for key, value in data.items()})


def _key(hint: Any, key: Any, name: str) -> Any:
    """JSON has text for keys."""
    if hint is str or type(key) is int:
        _expect(type(key) is hint, name, key)
        return key
    _expect(isinstance(key, str) and key.isascii() and key.isdigit(), name, key)
    return int(key)


def _expect(right: bool, name: str, value: object) -> None:
    if not right:
        raise BadMessage(f"{name} of a report cannot be {_short(value)}")


def _short(value: object) -> str:
    return repr(value)[:_LONGEST]


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)
