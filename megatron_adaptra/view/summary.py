"""The figures of a finished demo run, as summary.json has them: docs/files.md explains each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast

E = TypeVar("E")


class PhaseFigures(TypedDict):
    """A phase's figures hold the median of an arm's iterations."""

    iteration_ms: float


class ArmFigures(TypedDict):
    """An arm's figures hold each iteration, and those under the plan compared."""

    phases: Mapping[str, PhaseFigures]
    losses: Sequence[float]
    predicted_slow_ms: float | None
    measured_slow_ms: float | None
    peak_in_flight: Sequence[float] | None
    iteration_ms: Sequence[float]


class Times(TypedDict):
    """Times are medians over iterations of a phase, or of `what` part of it, and their noise.

    `noise`: share by which chance may move the ratio of both.
    """

    phase: str
    what: str
    first_iteration: int
    last_iteration: int
    stock_ms: float
    adaptra_ms: float
    noise: float


class Compared(TypedDict):
    """A comparison names the iterations under one plan that predictions are compared with."""

    phase: str
    first_iteration: int
    last_iteration: int
    warmup: Sequence[int]
    since_iteration: int


class Replan(TypedDict):
    """A replan records another schedule: since when, why, and with which gain."""

    iteration: int
    why: str
    warmup_before: Sequence[int]
    warmup_after: Sequence[int]
    predicted_ms: float
    measured_ms: float | None


class AllReduce(TypedDict):
    """An entry records another all-reduce of a group's gradients."""

    iteration: int
    detected: int
    ranks: Sequence[int]
    why: str
    before: str
    after: str
    late_ms: Sequence[float]
    native_ms: float
    predicted_ms: float
    measured_ms: float | None


class Shares(TypedDict):
    """An entry records other counts of the replicas' microbatches."""

    iteration: int
    detected: int
    why: str
    before: Sequence[int]
    after: Sequence[int]
    full_ms: float
    predicted_ms: float
    measured_ms: float | None
    lower_bound_ms: float | None
    cheaper: Sequence[Mapping[str, Any]]


class MemoryFigures(TypedDict):
    """Memory's figures hold activations by stage or worker: microbatches, and bytes if known."""

    budget: Sequence[float | None]
    predicted_peak: Sequence[float]
    measured_peak: Sequence[float]
    bytes_per_microbatch: Sequence[int] | None
    predicted_peak_bytes: Sequence[int] | None
    measured_peak_bytes: Sequence[int] | None


class Machine(TypedDict):
    """A machine's figures hold its cores and its load, by phase and of the plan compared."""

    cores: int | None
    load_average: Sequence[float]
    cpu_share: Mapping[str, Mapping[str, float]]


class Summary(TypedDict):
    """A summary holds all figures of a run. `config`: of the options, those that matter."""

    config: Mapping[str, Any]
    arms: Mapping[str, ArmFigures]
    workers: Sequence[str] | None
    losses_identical: bool
    parameters_identical: bool
    losses_difference: float | None
    parameters_difference: float
    equal_to_rounding: bool | None
    interrupted: str | None
    times: Sequence[Times]
    speedup_slow: float | None
    slowdown_healthy: float | None
    compared: Compared | None
    replans: Sequence[Replan]
    all_reduces: Sequence[AllReduce]
    shares: Sequence[Shares]
    detected_after_iterations: int | None
    versions: Mapping[str, str]
    memory: MemoryFigures | None
    machine: Machine
    notes: Sequence[str]


def entry(kind: type[E], decision: object, **figures: object) -> E:
    """Return the entry of a `kind`: by its keys, these `figures`, else the decision's attributes.

    `decision`: that the entry records.
    """
    found = {**vars(decision), **figures}
    return cast(E, {key: found[key] for key in kind.__annotations__})
