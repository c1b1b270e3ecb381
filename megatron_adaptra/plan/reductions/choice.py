"""The choice of a reduction: plain data, the same on all ranks, from which each makes its plan.

A plan may have thousands of ops, and each size of buffer has its own. So ranks agree on the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_adaptra.base.errors import BadInput, reading
from megatron_adaptra.ir.collective import CollectivePlan, Goal
from megatron_adaptra.model.all_reduce_forms import SHARDED
from megatron_adaptra.plan.reductions.builders import (
    direct,
    halving_doubling,
    ring,
    sharded_plan,
    shares_without,
    sorted_chain,
    whole,
)
from megatron_adaptra.plan.reductions.stragglar import stragglar

NATIVE = "native"
CHOICES = (NATIVE, "ring", "halving-doubling", "direct", "stragglar", "sorted-chain")
LONGEST = 1 << 20  # pieces, ranks or parts of a share: larger numbers are damaged data
_LATE, _PIECES = ("stragglar", "sorted-chain"), ("ring", "direct", *("stragglar", "sorted-chain"))


@dataclass(frozen=True)
class Choice:
    """A choice names an all-reduce, or a reduce-scatter and the all-gather after it.

    Args:
        ranks: at least 1.
        algorithm: one of CHOICES; native: the framework's own.
        pieces: `cut` of a ring, `pieces` of direct and of a chain, `k` of StragglAR; 0 for others.
        shares: of direct, by rank, its part of the buffer, as a share of their sum; () for others.
        late: the late rank of StragglAR; the ranks at the end of a chain, in the order in which
            they arrive; () for others.
        sharded: a reduce-scatter into equal shards, which have no owners to choose: by native, or
            one of SHARDED.

    Raises:
        BadInput: arguments that no builder takes, or that the algorithm does not have.
    """

    ranks: int
    algorithm: str = NATIVE
    pieces: int = 0
    shares: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    sharded: bool = False

    def __post_init__(self) -> None:
        whole("ranks", self.ranks, 1)
        if self.algorithm not in CHOICES:
            allowed = f"it has to be one of {', '.join(CHOICES)}"
            raise BadInput("algorithm", self.algorithm, allowed)
        if type(self.sharded) is not bool:
            raise BadInput("sharded", self.sharded, "true or false")
        if self.sharded and self.algorithm not in (NATIVE, *SHARDED):
            allowed = f"shards are reduced by {', '.join((NATIVE, *SHARDED))}"
            raise BadInput("algorithm", self.algorithm, allowed)
        if self.algorithm in _PIECES:
            whole("pieces", self.pieces, 1)
        elif self.pieces != 0:
            raise BadInput("pieces", self.pieces, f"{self.algorithm} has none")
        if max(self.ranks, self.pieces, *self.shares, 0) > LONGEST:
            raise BadInput("choice", self.to_json(), f"no number above {LONGEST}")
        owned = self.algorithm == "direct" and not self.sharded
        if len(self.shares) != self.ranks * owned:
            raise BadInput("shares", list(self.shares), "direct has one per rank, others none")
        for share in self.shares:
            whole("share", share, 0)
        if self.shares and not any(self.shares):
            raise BadInput("shares", list(self.shares), "at least one above 0")
        if self.late and self.algorithm not in _LATE:
            raise BadInput("late ranks", list(self.late), f"{self.algorithm} has none")
        if len(set(self.late)) != len(self.late):
            raise BadInput("late ranks", list(self.late), "each once")
        if self.late:
            shares_without(self.ranks, self.late)  # which refuses ranks that there are not
        if self.algorithm == "stragglar" and (len(self.late) != 1 or self.ranks < 4):
            raise BadInput("late ranks", list(self.late), "stragglar needs one, of at least 4")

    @property
    def native(self) -> bool:
        """True where the framework's own collectives run."""
        return self.algorithm == NATIVE

    def by_native(self) -> Choice:
        """Return the same reduction by the framework's own collectives."""
        return Choice(self.ranks, sharded=self.sharded)

    def plan(self) -> CollectivePlan | None:
        """Return the plan that all ranks run; None for native. Equal choices have equal plans."""
        if self.sharded and not self.native:
            return sharded_plan(Goal.REDUCE_SCATTER, self.algorithm, self.ranks, self.pieces)
        if self.native:
            return None
        return built(self.algorithm, self.ranks, self.pieces, self.shares, self.late)

    def gathering(self) -> CollectivePlan | None:
        """Return the plan of the all-gather after a reduce-scatter; None without one."""
        if not self.sharded or self.native:
            return None
        return sharded_plan(Goal.ALL_GATHER, self.algorithm, self.ranks, self.pieces)

    def transfers(self) -> int:
        """Return about how many messages it has: the cost of its plan and its simulation."""
        others, pieces = self.ranks - 1, self.pieces
        if self.shares:
            most = max(self.shares)
            return sum(max(1, round(pieces * s / most)) for s in self.shares if s) * 2 * others
        if self.algorithm == "halving-doubling":
            return 4 * self.ranks * self.ranks.bit_length()
        if self.algorithm == "sorted-chain":
            return 2 * pieces * others
        if self.algorithm == "stragglar":
            return 2 * pieces * others * others
        return 2 * max(1, pieces) * self.ranks * others

    def __str__(self) -> str:
        """Return the words in a decision: `direct, nothing owned by 2`."""
        if self.shares:
            return f"direct, {_owned(self.shares)}"
        if self.late:
            word = "rank" if len(self.late) == 1 else "ranks"
            return f"{self.algorithm}, late {word} {', '.join(map(str, self.late))}"
        return self.algorithm

    def to_json(self) -> Any:
        """Return an object for json.dump; equal choices give equal text."""
        found = asdict(self)
        return found | {"shares": list(self.shares), "late": list(self.late)}

    @classmethod
    def from_json(cls, data: object) -> Choice:
        """Read a choice from `data`, the JSON object of `to_json`. Raises BadInput."""
        with reading("all-reduce", data):
            given = dict(data)  # type: ignore[call-overload]
            given |= {name: tuple(given[name]) for name in ("shares", "late")}
            return cls(**given)


def _owned(shares: tuple[int, ...]) -> str:
    none = [str(rank) for rank, share in enumerate(shares) if not share]
    most = max(shares)
    less = [f"{r} ({s / most:.0%})" for r, s in enumerate(shares) if 0 < s < most]
    parts = [f"nothing owned by {', '.join(none)}"] * bool(none)
    parts += [f"less by {', '.join(less)}"] * bool(less)
    return ", ".join(parts) or "equal shares"


def built(
    algorithm: str, ranks: int, pieces: int, shares: Sequence[int], late: Sequence[int]
) -> CollectivePlan:
    """Return the all-reduce of `algorithm`, one of CHOICES but native.

    Args:
        algorithm, ranks, pieces: as of Choice.
        shares: of direct.
        late: of StragglAR, the late rank; of a chain, the ranks at its end.

    Raises:
        BadInput: arguments that its builder refuses.
    """
    if algorithm == "ring":
        return ring(ranks, pieces)
    if algorithm == "halving-doubling":
        return halving_doubling(ranks)
    if algorithm == "direct":
        return direct(shares, pieces)
    if algorithm == "stragglar":
        return stragglar(ranks, late[0], pieces)
    return sorted_chain([*(rank for rank in range(ranks) if rank not in late), *late], pieces)
