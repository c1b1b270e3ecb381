"""Sync plans: the microbatches that each data-parallel replica runs, and their weight.

Stock runs `microbatches` (M) in each of N replicas: microbatch j of home h is the pair (h, j), the
samples that Megatron's own sampler gives to replica h. Here replica r runs `counts[r]` of the N M
pairs, all of them are run once, and so the global batch stays as it is:

- its own pairs (r, 0), (r, 1), ..., at most M of them; then,
- where it runs more than M, pairs that their homes do not run. These stand in the order (j, h), and
  replicas that run more take theirs from the front, one replica after the other, lowest first.

Megatron divides each loss by how many microbatches it is given, counts[r], and then takes the mean
over the N replicas. So that every microbatch counts the same, replica r's losses are multiplied by
its weight, counts[r] N / (N M) = counts[r] / M.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from megatron_adaptra.base.errors import BadInput

__all__ = ["MOST_PAIRS", "Pair", "SyncPlan", "check_counts", "check_sync", "parse_sync"]

MOST_PAIRS = 1 << 20  # microbatches of one iteration, of all replicas: the check looks at each
_TEXT = re.compile(r"sync ([1-9][0-9]{0,8}): ([1-9][0-9]{0,8}(?: [1-9][0-9]{0,8})*)\n?")

Pair = tuple[int, int]  # the home replica of a microbatch, and its number there


@dataclass(frozen=True)
class SyncPlan:
    """Replica r runs `counts[r]` microbatches, where stock has it run `microbatches`.

    Whenever one is made or read, it is checked: raises BadInput where counts are below 1 or do not
    add up to the global batch, replicas x microbatches.
    """

    microbatches: int
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        check_counts(self.microbatches, self.counts)
        weights = [self.weight(replica) for replica in range(self.replicas)]
        check_sync(self.microbatches, self.counts, self._shares, weights)

    @classmethod
    def full_of(cls, replicas: int, microbatches: int) -> SyncPlan:
        """Stock: each of so many `replicas` runs so many `microbatches`."""
        return cls(microbatches, (microbatches,) * replicas)

    @property
    def replicas(self) -> int:
        """The number of replicas, N."""
        return len(self.counts)

    @property
    def total(self) -> int:
        """Microbatches of the global batch, N M."""
        return self.replicas * self.microbatches

    @property
    def full(self) -> bool:
        """True where each replica runs exactly the microbatches that stock has it run."""
        return all(count == self.microbatches for count in self.counts)

    def share(self, replica: int) -> tuple[Pair, ...]:
        """The microbatches that `replica` runs, in order: each as its home, and its number there.

        All of the replica's own stand before those of other homes.
        """
        return self._shares[replica]

    def weight(self, replica: int) -> Fraction:
        """Return the factor of the mean loss over the microbatches of `replica`; 1 in stock."""
        return Fraction(self.counts[replica], self.microbatches)

    @cached_property
    def _shares(self) -> tuple[tuple[Pair, ...], ...]:
        homes, each = range(self.replicas), self.microbatches
        least = min(self.counts)
        left = [(h, j) for j in range(least, each) for h in homes if j >= self.counts[h]]
        shares, begin = [], 0
        for replica, count in enumerate(self.counts):
            end = begin + max(count - each, 0)
            own = [(replica, j) for j in range(min(count, each))]
            shares.append((*own, *left[begin:end]))
            begin = end
        return tuple(shares)

    def text(self) -> str:
        """One line: `sync 8: 9 9 9 5`, M and the counts; `parse_sync` reads it back exactly."""
        return f"sync {self.microbatches}: {' '.join(map(str, self.counts))}\n"

    def to_json(self) -> str:
        """Return the text form: plans are voted on as values of a Bundle."""
        return self.text()

    def digest(self) -> str:
        """SHA-256 of the text form: equal digests mean equal plans."""
        return hashlib.sha256(self.text().encode()).hexdigest()


def parse_sync(text: str) -> SyncPlan:
    """The plan of a `text` that `SyncPlan.text` has written; raises BadInput for any other."""
    found = _TEXT.fullmatch(text)
    if found is None:
        allowed = "'sync', the microbatches per replica, ':' and one count per replica"
        raise BadInput("shares of microbatches", text, allowed)
    return SyncPlan(int(found[1]), tuple(int(count) for count in found[2].split()))


def check_counts(microbatches: int, counts: Sequence[int]) -> None:
    """Raise BadInput unless `counts` share out a global batch of so many `microbatches` each.

    Each is at least 1, and together they are len(counts) x microbatches, at most MOST_PAIRS.
    """
    if not _whole(microbatches) or microbatches < 1:
        raise BadInput("microbatches per replica", microbatches, "a whole number of at least 1")
    if not counts:
        raise BadInput("counts of microbatches", [], "one per replica, and at least 1 replica")
    for replica, count in enumerate(counts):
        if not _whole(count) or count < 1:
            allowed = "a whole number of at least 1: a replica that runs nothing has no gradients"
            raise BadInput(f"count of replica {replica}", count, allowed)
    total = len(counts) * microbatches
    if total > MOST_PAIRS:
        raise BadInput("microbatches of an iteration", total, f"at most {MOST_PAIRS}")
    if sum(counts) != total:
        allowed = (
            f"they add up to {sum(counts)}, and the global batch has {total} microbatches,"
            f" {len(counts)} x {microbatches}"
        )
        raise BadInput("counts of microbatches", list(counts), allowed)


def check_sync(
    microbatches: int,
    counts: Sequence[int],
    shares: Sequence[Sequence[Pair]],
    weights: Sequence[Fraction],
) -> None:
    """Prove that an iteration counts every sample once: raise BadInput, one line, unless it does.

    `shares[r]` are the pairs that replica r runs, `counts[r]` how many these have to be, and
    `weights[r]` what its mean loss is multiplied by. Proven: every pair of a home and one of its
    `microbatches` is run by exactly one replica, and in the mean over the replicas each weighs
    1 / (replicas x microbatches).
    """
    check_counts(microbatches, counts)
    for what, values in (("shares", shares), ("weights", weights)):
        if len(values) != len(counts):
            allowed = f"one per replica, and there are {len(counts)}"
            raise BadInput(f"{what} of microbatches", f"{len(values)} of them", allowed)
    runs: dict[Pair, int] = {}
    for replica, share in enumerate(shares):
        if len(share) != counts[replica]:
            allowed = f"its count is {counts[replica]}"
            raise BadInput(f"share of replica {replica}", f"{len(share)} microbatches", allowed)
        for pair in share:
            _check_pair(pair, replica, len(counts), microbatches)
            if pair in runs:
                allowed = f"replica {runs[pair]} runs it already: its samples would count twice"
                raise BadInput(f"share of replica {replica}", pair, allowed)
            runs[pair] = replica
    for home in range(len(counts)):  # none can be lost where as many different ones are run
        for j in range(microbatches):
            if (home, j) not in runs:
                raise BadInput("shares of microbatches", (home, j), "no replica runs it")
    for replica, weight in enumerate(weights):
        if weight / counts[replica] != Fraction(1, microbatches):
            allowed = f"{counts[replica]}/{microbatches}, so that each microbatch counts the same"
            raise BadInput(f"weight of replica {replica}", str(weight), allowed)
    if sum(weights) != len(counts):
        raise BadInput("weights of replicas", str(sum(weights)), f"they sum to {len(counts)}")


def _check_pair(pair: Pair, replica: int, replicas: int, microbatches: int) -> None:
    home, j = pair
    if not (0 <= home < replicas and 0 <= j < microbatches):
        allowed = f"homes are 0 to {replicas - 1}, microbatches 0 to {microbatches - 1}"
        raise BadInput(f"share of replica {replica}", pair, allowed)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
