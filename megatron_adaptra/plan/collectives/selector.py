"""`auto`: the all-reduce that the clock of ports finds fastest, where it gains enough.

Judged are the seconds from the arrival of the last rank to the end of the last one. Native stays
where nothing stands out (no rank is late, no port or path is slow), so that such a training keeps
its bits, and where the gain is too small for what a clock can know. Equal figures give equal
choices on all ranks: there is no chance in it, and its work is counted in messages, not in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median_low
from typing import Any

from megatron_adaptra.errors import BadInput, reading
from megatron_adaptra.ir.buffers import Buffers
from megatron_adaptra.ir.conditions import LinkState
from megatron_adaptra.ir.infinity import infinite_if_null, null_if_infinite
from megatron_adaptra.model.all_reduce_forms import AllReduce
from megatron_adaptra.plan.collectives.choice import Choice
from megatron_adaptra.plan.collectives.owners import changed, first_shares, kinds, very_late
from megatron_adaptra.plan.collectives.sized import FEWEST_RANKS, pieces_for
from megatron_adaptra.plan.ten_digits import ten_digits
from megatron_adaptra.sim.ports import Ports, run_on_ports

# Share by which the clock flatters plans of our own over a ring (docs/evidence/allreduce.md).
CERTAIN = 0.06
STANDS_OUT = 0.1  # of a buffer's seconds, or of a rate: what is less is noise
MOST_RANKS = 128  # plans for more have too many messages to be judged while a training waits
WORK = 40_000  # messages that are simulated for one choice, beside native's
NATIVE_CUT = 2  # gloo's ring has two segments per rank
_ENOUGH = 0.02  # share that unequal shares have to gain over simpler ones: less is noise
# Share by which a chain has to be faster than others: it needs all the lateness it was chosen for.
_FRAGILE = 0.05


@dataclass(frozen=True)
class Figures:
    """What is known of an all-reduce: the only input of the selector, the same on all ranks.

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
        BadInput: another number of ports than ranks, or seconds or bytes that there are not.
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
        """How many take part."""
        return len(self.lateness)

    @property
    def buffer(self) -> float:
        """Seconds of all buffers through an ordinary port."""
        return self.nbytes / median_low([*self.ports.out, *self.ports.into])

    @property
    def very_late(self) -> tuple[int, ...]:
        """Ranks that must own nothing of what is chosen from these figures; see owners.py."""
        return very_late(self.buffer, self.lateness)

    @property
    def mean_buffer(self) -> int:
        """Bytes of a buffer."""
        return self.nbytes // self.buffers.count

    def rounded(self) -> Figures:
        """With ten digits of each: what differs in the last bits alone is the same here.

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
        """As an object for json.dump, in seconds and bytes per second; null stands for infinity."""
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
        """What `to_json` has made of figures: `data`, read from JSON. Raises BadInput."""
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
        """Whether a rank is late, a port is slow or a path is."""
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


@dataclass(frozen=True)
class Chosen:
    """`choice`, and the seconds after the last arrival that it and native are predicted to take.

    Both are 0 where nothing stands out, so that nothing was predicted. `besides`: seconds of an
    iteration that it saves elsewhere: of a reduce-scatter, in the all-gather after it.
    """

    choice: Choice
    seconds: float
    native: float
    besides: float = 0.0

    @property
    def gain(self) -> float:
        """Seconds of an iteration that it saves over native."""
        return self.native - self.seconds + self.besides

    def to_json(self) -> dict[str, Any]:
        """As an object for json.dump."""
        return {
            "choice": self.choice.to_json(), "seconds": self.seconds, "native": self.native,
            "besides": self.besides,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: object) -> Chosen:
        """What `to_json` has made of a choice: `data`, read from JSON. Raises BadInput."""
        with reading("all-reduce chosen", data):
            given = dict(data)  # type: ignore[call-overload]
            for name in ("seconds", "native"):
                if not 0 <= given[name] < math.inf:
                    raise BadInput(name, given[name], "seconds of at least 0")
            if not math.isfinite(given["besides"]):
                raise BadInput("besides", given["besides"], "seconds")
            return cls(**given | {"choice": Choice.from_json(given["choice"])})


def choose_all_reduce(figures: Figures, in_force: Choice, min_gain: float) -> Chosen:
    """The all-reduce to run from now on; `in_force` where no other one is clearly better.

    Args:
        figures: what is known.
        in_force: what runs now.
        min_gain: share of an iteration's seconds that a plan has to save over native, and another
            plan over the one in force. The one in force goes, for native, once it saves less than
            half of that, or nothing stands out any more.

    Raises:
        BadInput: `in_force` is for another number of ranks, or `min_gain` is below 0.
    """
    ranks = figures.ranks
    if in_force.ranks != ranks:
        raise BadInput("all-reduce in force", f"for {in_force.ranks} ranks", f"here are {ranks}")
    if not min_gain >= 0:
        raise BadInput("min_gain", min_gain, "at least 0")
    figures = figures.rounded()
    if not 1 < ranks <= MOST_RANKS or not figures.stands_out:
        return Chosen(Choice(ranks), 0.0, 0.0)
    search = _Search(figures)
    enough = max(min_gain * figures.iteration, CERTAIN * search.native)
    current = Choice(ranks)
    if search.affords(in_force) and _saves(search.native - search.seconds(in_force), enough / 2):
        current = in_force
    best = search.best()
    if best is not None and _saves(search.seconds(current) - search.seconds(best), enough):
        current = best
    return search.chosen(current)


def by_gloo(ports: Ports) -> Ports:
    """As gloo, which is native on CPUs, finds `ports`.

    No message leaves before its receiver's word that it is ready. A rank gives it in each step of a
    ring, so that a step crosses two delays (measured: docs/evidence/allreduce.md).
    """
    paths = {way: path._replace(delay=2 * path.delay) for way, path in ports.paths.items()}
    return replace(ports, delay=2 * ports.delay, paths=paths)


def _saves(seconds: float, enough: float) -> bool:
    """Whether they are something, and enough."""
    return seconds > 0 and seconds >= enough


def simulated(choice: Choice, figures: Figures, most: int) -> float:
    """Seconds that a `choice`, not native, takes after the last rank has arrived, to ten digits.

    Buffers wait for each other, or overlap with backwards. Then all of them go as one, into which
    no more than `most` pieces are cut: each message costs as much as those for which it stands.
    What becomes ready while others are reduced is hidden, but for the last buffer.
    """
    f, buffers = figures, figures.buffers
    if not buffers.overlap:
        first = _run(choice, f.mean_buffer, f.ports, f.lateness)
        more = buffers.count - 1
        return ten_digits(first + (more and more * _run(choice, f.mean_buffer, f.ports, ())))
    whole = as_one(choice, figures, most)
    messages = max(1, choice.pieces) * buffers.count / max(1, whole.pieces)
    seconds = _run(whole, f.nbytes, replace(f.ports, cost=messages * f.ports.cost), f.lateness)
    last = _run(choice, buffers.last, f.ports, f.lateness)
    return ten_digits(max(seconds - buffers.overlap, last))


def as_one(choice: Choice, figures: Figures, most: int) -> Choice:
    """The `choice` for all buffers in one, in `most` pieces at most: as `simulated` has it."""
    each, count = choice.pieces, figures.buffers.count
    return replace(choice, pieces=min(each * count, max(each, most))) if each else choice


def _run(choice: Choice, nbytes: int, ports: Ports, lateness: Sequence[float]) -> float:
    plan = choice.plan()
    assert plan is not None
    return run_on_ports(plan, nbytes, ports, lateness).after_arrival


def _odds(choice: Choice) -> float:
    return 1 + _FRAGILE * (choice.algorithm == "sorted-chain")


def _most_pieces(job: AllReduce, algorithm: str) -> int:
    """Into how many pieces it is worth while to cut all buffers, of the bytes of `job`."""
    return pieces_for(algorithm, job) if algorithm != "halving-doubling" else 0


class _Search:
    """The candidates for `figures`, and what the clock finds that they take."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._very_late = figures.very_late
        self._left = float(WORK)
        self._seconds: dict[Choice, float] = {}
        self._buffer = self._job(figures.mean_buffer)
        self._most = cache(partial(_most_pieces, self._job(figures.nbytes)))
        gloo, by_ring = replace(figures, ports=by_gloo(figures.ports)), self._most("ring")
        ring = simulated(Choice(figures.ranks, "ring", NATIVE_CUT), gloo, by_ring)
        # A busy machine is slow for our plans, too: it does not count against native alone.
        self.native = ring if figures.native is None else min(ring, figures.native)

    def _job(self, nbytes: int) -> AllReduce:
        """As closed forms know it, of so many bytes."""
        f, ports = self._figures, self._figures.ports
        return AllReduce(
            f.ranks, nbytes, median_low(ports.out), ports.delay, ports.cost, max(f.lateness),
            ports.turn,
        )  # fmt: skip

    def affords(self, choice: Choice) -> bool:
        """Whether it has been simulated, or may be: its messages are within what is left."""
        return choice.native or choice in self._seconds or self._work(choice) <= self._left

    def _work(self, choice: Choice) -> int:
        """Messages that are simulated to judge it: see `simulated`."""
        f, one = self._figures, choice.transfers()
        if not f.buffers.overlap:
            return one if f.buffers.count == 1 else 2 * one
        return one + as_one(choice, f, self._most(choice.algorithm)).transfers()

    def seconds(self, choice: Choice) -> float:
        """What it takes after the last arrival, to ten digits; native: as known."""
        if choice.native:
            return self.native
        if choice not in self._seconds:
            self._left -= self._work(choice)
            most = self._most(choice.algorithm)
            self._seconds[choice] = simulated(choice, self._figures, most)
        return self._seconds[choice]

    def _simulated_of(self, choices: Iterable[Choice]) -> list[Choice]:
        """Those that there was work left for, with nothing owned by who comes very late."""
        found = []
        for choice in map(self._permitted, choices):
            if choice is not None and self.affords(choice):
                self.seconds(choice)
                found.append(choice)
        return found

    def _permitted(self, choice: Choice) -> Choice | None:
        """The `choice` without what very late ranks own of it; None if nobody else owns anything.

        The clock may find that they should own a little, but it does not know how much later still
        they may come.
        """
        late = self._very_late
        if not any(choice.shares[rank] for rank in late if choice.shares):
            return choice
        shares = tuple(0 if r in late else share for r, share in enumerate(choice.shares))
        return replace(choice, shares=shares) if any(shares) else None

    def chosen(self, choice: Choice) -> Chosen:
        """The `choice` with its seconds."""
        return Chosen(choice, self.seconds(choice), self.native)

    def best(self) -> Choice | None:
        """The fastest of what could be simulated; of equals the first. None: there was nothing."""
        tried = self._simulated_of(self._simple())
        owners = [choice for choice in tried if choice.algorithm == "direct"]
        if owners:
            tried.append(self._best_shares(min(owners, key=self.seconds)))
        return min(tried, key=lambda choice: self.seconds(choice) * _odds(choice), default=None)

    def _simple(self) -> Iterator[Choice]:
        """All but the search for shares, those that help most often first."""
        f = self._figures
        ranks = f.ranks
        pieces = pieces_for("direct", self._buffer)
        for shares in first_shares(f.buffer, f.ports, f.lateness):
            yield Choice(ranks, "direct", pieces, shares)
        by_arrival = sorted(range(ranks), key=lambda rank: (f.lateness[rank], rank))
        late = tuple(r for r in by_arrival if f.lateness[r] > STANDS_OUT * f.buffer)
        if late and ranks >= FEWEST_RANKS["stragglar"]:
            yield Choice(ranks, "stragglar", pieces_for("stragglar", self._buffer), late=late[-1:])
        if late:
            cut = pieces_for("sorted-chain", self._buffer)
            yield Choice(ranks, "sorted-chain", cut, late=late)
        yield Choice(ranks, "ring", pieces_for("ring", self._buffer))
        yield Choice(ranks, "halving-doubling")

    def _best_shares(self, best: Choice) -> Choice:
        """From these shares on: one kind of ranks at a time owns more or less."""
        f = self._figures
        of = kinds(f.buffer, f.ports, f.lateness)
        before = None
        while best != before:
            before = best
            best = self._fastest(best, [replace(best, shares=s) for s in changed(best.shares, of)])
        cuts = [cut for cut in (best.pieces // 2, 2 * best.pieces) if cut]
        return self._fastest(best, [replace(best, pieces=cut) for cut in cuts])

    def _fastest(self, first: Choice, others: Sequence[Choice]) -> Choice:
        """The fastest of the `others` that can be simulated, if it is clearly faster."""
        tried = self._simulated_of(others)
        best = min(tried, key=self.seconds, default=first)
        return best if self.seconds(best) < (1 - _ENOUGH) * self.seconds(first) else first
