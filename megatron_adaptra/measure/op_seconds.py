"""The recent seconds of each stage's ops, also of ops that did not run lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from megatron_adaptra.measure.report import StageReport

WINDOW = 5  # iterations over which op seconds are taken
LIMITS = 0.9, 1.25  # of a correction's factor


class OpSeconds(NamedTuple):
    """An OpSeconds holds the seconds that the ops of one microbatch take on one stage."""

    forward: float
    backward: float  # in one piece
    backward_input: float
    backward_weight: float
    recomputation: float


class Shares(NamedTuple):
    """A set of shares gives the cost of halves relative to a backward, of R to a forward."""

    backward_input: float = 0.5
    backward_weight: float = 0.5
    recomputation: float = 1.0


class StageOps:
    """A StageOps keeps the op seconds of one stage in the last iterations.

    `cores`: see Conditions; where they are given, CPU seconds count. `chunks`: of the stage.
    """

    def __init__(self, cores: float | None, chunks: int) -> None:
        self._cores, self._chunks = cores, chunks
        self._seconds: deque[OpSeconds] = deque(maxlen=WINDOW)
        self._shares: deque[Shares] = deque(maxlen=WINDOW)

    def update(self, report: StageReport) -> None:
        """Take the stage's `report` of an iteration, if it has run a microbatch."""
        if "F" not in report.wall:
            return
        scale, seconds = 1.0, report.wall
        if self._cores is not None:
            scale, seconds = report.overhead, report.cpu
        shares = Shares(*_medians(self._shares)) if self._shares else Shares()
        shares = _shares(seconds, shares)
        self._shares.append(shares)
        self._seconds.append(_op_seconds(seconds, scale * self._chunks, shares))

    @property
    def known(self) -> bool:
        """True once a report of a microbatch has been taken."""
        return bool(self._seconds)

    def seconds(self) -> OpSeconds:
        """Return the medians of the last iterations."""
        return OpSeconds(*_medians(self._seconds))


class Correction:
    """A correction scales op seconds: cores and caches are shared in ways not modelled."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=WINDOW)

    def learn(self, predicted: float, measured: float) -> None:
        """Take note of an iteration's `predicted` (uncorrected) and `measured` seconds."""
        if predicted > 0:
            self._ratios.append(measured / predicted)

    @property
    def factor(self) -> float:
        """The median of measured over predicted seconds, within LIMITS; 1 before there are any."""
        least, most = LIMITS
        return min(max(median(self._ratios), least), most) if self._ratios else 1.0


def _shares(seconds: Mapping[str, float], before: Shares) -> Shares:
    """Return the shares by one iteration's `seconds`; those `before` for ops that did not run."""
    half, rest, again = before
    if "I" in seconds and (both := seconds["I"] + seconds["W"]) > 0:
        whole = seconds.get("B", 0.0) or both / (half + rest or 1.0)
        half, rest = seconds["I"] / whole, seconds["W"] / whole
    if "R" in seconds and seconds["F"] > 0:
        again = seconds["R"] / seconds["F"]
    return Shares(half, rest, again)


def _op_seconds(seconds: Mapping[str, float], scale: float, shares: Shares) -> OpSeconds:
    """Return the `seconds` of ops that ran, and by `shares` those of the others; all by `scale`."""
    forward, whole = seconds["F"], seconds.get("B", 0.0)
    half, rest = shares.backward_input * whole, shares.backward_weight * whole
    if "I" in seconds:
        half, rest = seconds["I"], seconds["W"]
    if "B" not in seconds:
        whole = (half + rest) / (shares.backward_input + shares.backward_weight or 1.0)
    again = seconds.get("R", shares.recomputation * forward)
    return OpSeconds(*(scale * value for value in (forward, whole, half, rest, again)))


def _medians(window: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(median(column) for column in zip(*window, strict=True))
