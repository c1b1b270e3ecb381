"""Figures of the all-reduce of a data-parallel group: the only input of the selector."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

from megatron_adaptra.base.errors import BadInput, reading
from megatron_adaptra.base.units import ten_digits
from megatron_adaptra.ir.conditions import LinkState, infinite_if_null, null_if_infinite
from megatron_adaptra.plan.reductions.owners import very_late
from megatron_adaptra.sim.ports import Ports

STANDS_OUT = 0.1  # share of a buffer's seconds, or of a rate, below which differences are noise


@dataclass(frozen=True)
class Buffers:
    """A Buffers describes the gradient buffers of an iteration; by default one, with no overlap.

    Args:
        count: how many there are; they are reduced one after another.
        overlap: seconds from when the first buffer is ready until the last one is, in which the
            others are reduced; 0 where each waits for the one before.
        last: bytes of the buffer that is ready last; used only where `overlap` is above 0.
        gathers: how many all-gathers of shards follow, each of one buffer.
        hides: seconds of each all-gather, except the first, that forwards hide.
    """

    count: int = 1
    overlap: float = 0.0
    last: int = 0
    gathers: int = 1
    hides: float = 0.0

    def exposed(self, gather: float) -> float:
        """Return the seconds by which the all-gathers lengthen an iteration.

        `gather`: seconds of one. Each begins when the one before has ended, and is hidden by the
        computation that runs until its result is needed.
        """
        return gather + (self.gathers - 1) * max(0.0, gather - self.hides)

    def check(self, nbytes: int) -> None:
        """Check them for gradients of `nbytes` in all.

        Raises:
            BadInput: a value is out of range.
        """
        for name, seconds in (("overlap", self.overlap), ("gathers that are hidden", self.hides)):
            if not 0 <= seconds < math.inf:
                raise BadInput(f"seconds of {name}", seconds, "at least 0")
        if not 0 <= self.last <= nbytes:
            raise BadInput("last bytes", self.last, f"0 to {nbytes}, which are all")
        for name, value in (("buffers", self.count), ("gathers", self.gathers)):
            if value < 1:
                raise BadInput(name, value, "at least 1")


@dataclass(frozen=True)
class Figures:
    """A set of figures describes an all-reduce: the selector's only input, equal on all ranks.

    Args:
        nbytes: of all buffers.
        ports: of the ranks, with their delays and slow paths.
        lateness: seconds at which each rank comes, from any moment on.
        iteration: seconds of an iteration, of which a gain is a share.
        native: seconds from the arrival of the last rank that native was measured to take; None
            where it was not. A rank arrives with its last gradients.
        buffers: how many there are, each of which is cut into the same number of pieces, and what
            hides them.

    Raises:
        BadInput: another number of ports than ranks, or impossible seconds or bytes.
    """

    nbytes: int
    ports: Ports
    lateness: tuple[float, ...]
    iteration: float
    native: float | None = None
    buffers: Buffers = Buffers()

    def __post_init__(self) -> None:
        ranks = len(self.ports.out)
        if self.nbytes < 0:
            raise BadInput("bytes", self.nbytes, "at least 0")
        if len(self.lateness) != ranks:
            raise BadInput("lateness", len(self.lateness), f"one per rank: {ranks}")
        if not all(0 <= late < math.inf for late in self.lateness):
            raise BadInput("lateness", list(self.lateness), "seconds of at least 0")
        if max(*self.ports.out, *self.ports.into) == math.inf:
            raise BadInput("rate of a port", math.inf, "bytes per second, as measured")
        if not 0 < self.iteration < math.inf:
            raise BadInput("seconds of an iteration", self.iteration, "above 0")
        if self.native is not None and not 0 <= self.native < math.inf:
            raise BadInput("seconds of native", self.native, "at least 0")
        self.buffers.check(self.nbytes)

    @property
    def ranks(self) -> int:
        """The number of ranks that take part."""
        return len(self.lateness)

    @property
    def buffer(self) -> float:
        """The seconds of all buffers through an ordinary port."""
        return self.nbytes / median_low([*self.ports.out, *self.ports.into])

    @property
    def very_late(self) -> tuple[int, ...]:
        """The ranks that must own nothing in a choice by these figures; see owners.py."""
        return very_late(self.buffer, self.lateness)

    @property
    def mean_buffer(self) -> int:
        """The bytes of a buffer, on average."""
        return self.nbytes // self.buffers.count

    def rounded(self) -> Figures:
        """Return the figures with ten digits each: differences in the last bits do not count.

        Lateness counts from the first rank on.
        """
        ports, first = self.ports, min(self.lateness, default=0.0)
        return replace(
            self,
            ports=replace(
                ports,
                out=tuple(map(ten_digits, ports.out)),
                into=tuple(map(ten_digits, ports.into)),
                delay=ten_digits(ports.delay),
                cost=ten_digits(ports.cost),
                paths={
                    way: LinkState(ten_digits(path.delay), ten_digits(path.bandwidth))
                    for way, path in sorted(ports.paths.items())
                },
            ),
            lateness=tuple(ten_digits(late - first) for late in self.lateness),
            iteration=ten_digits(self.iteration),
            native=None if self.native is None else ten_digits(self.native),
            buffers=replace(
                self.buffers,
                overlap=ten_digits(self.buffers.overlap),
                hides=ten_digits(self.buffers.hides),
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Return an object for json.dump, in seconds and bytes per second; null is infinity."""
        ports = self.ports
        return {
            "bytes": self.nbytes,
            "out": list(ports.out),
            "into": list(ports.into),
            "delay": ports.delay,
            "message_cost": ports.cost,
            "turn": null_if_infinite(ports.turn),
            "paths": {
                f"{source}>{target}": {
                    "delay": path.delay,
                    "bandwidth": null_if_infinite(path.bandwidth),
                }
                for (source, target), path in sorted(ports.paths.items())
            },
            "late": list(self.lateness),
            "iteration": self.iteration,
            "native": self.native,
            "buffers": vars(self.buffers),
        }

    @classmethod
    def from_json(cls, data: object) -> Figures:
        """Read figures from `data`, the JSON object of `to_json`. Raises BadInput."""
        with reading("figures of an all-reduce", data):
            given = dict(data)  # type: ignore[call-overload]
            paths = {}
            for way, path in given["paths"].items():
                source, _, target = way.partition(">")
                rate = infinite_if_null(path["bandwidth"])
                paths[int(source), int(target)] = LinkState(path["delay"], rate)
            ports = Ports(
                tuple(given["out"]), tuple(given["into"]), given["delay"], given["message_cost"],
                infinite_if_null(given["turn"]), paths,
            )  # fmt: skip
            late = tuple(given["late"])
            return cls(
                given["bytes"], ports, late, given["iteration"], given["native"],
                Buffers(**given.get("buffers", {})),
            )  # fmt: skip

    @property
    def stands_out(self) -> bool:
        """True where a rank is late, or a port or a path is slow."""
        least = STANDS_OUT * self.buffer
        if any(late > least for late in self.lateness):
            return True
        for side in (self.ports.out, self.ports.into):
            if min(side) < (1 - STANDS_OUT) * median_low(side):
                return True
        for (source, target), path in self.ports.paths.items():
            rate = min(self.ports.out[source], self.ports.into[target])
            if path.delay > least or path.bandwidth < (1 - STANDS_OUT) * rate:
                return True
        return False
