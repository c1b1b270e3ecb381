"""The all-reduce of a data-parallel group's gradients, as the value that its ranks vote on."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_adaptra.agree.bundle import Value, ValueKind
from megatron_adaptra.base.errors import BadBundle, BadInput, reading
from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.plan.reductions.choice import Choice

_WHAT = ("whole buffers", "shards")
_KEYS = {"choice", "late"}


@dataclass(frozen=True)
class GroupReduction(Value):
    """A group all-reduce runs `choice`; `late` ranks come so late that they must own no part."""

    choice: Choice
    late: tuple[int, ...] = ()

    def to_json(self) -> Any:
        return {"choice": self.choice.to_json(), "late": list(self.late)}

    @classmethod
    def from_json(cls, data: object) -> GroupReduction:
        """Make a value from `data`: JSON that `to_json` has made. Raises BadInput."""
        with reading("all-reduce", data):
            given = dict(data)  # type: ignore[call-overload]
            if given.keys() != _KEYS:
                raise BadInput("all-reduce", data, f"an object of {', '.join(sorted(_KEYS))}")
            late = tuple(given["late"])
            if not all(type(rank) is int for rank in late):
                raise BadInput("late ranks", given["late"], "numbers of ranks")
            return cls(Choice.from_json(given["choice"]), late)

    @cached_property
    def plan(self) -> CollectivePlan | None:
        """The plan that all ranks run, proven to be an all-reduce; None for the framework's own."""
        return self.choice.plan()

    @cached_property
    def gathering(self) -> CollectivePlan | None:
        """The all-gather after a reduce-scatter; None for the framework's own."""
        return self.choice.gathering()

    @cached_property
    def mark(self) -> int:
        """A checksum of 32 bits: two different values share one in four thousand million cases."""
        return zlib.crc32(repr(self.to_json()).encode())


def _check_all_reduce(value: GroupReduction, now: GroupReduction) -> None:
    """Raise BadBundle for another shape or a late owner; or an error of the plan's own proof."""
    choice, ranks = value.choice, now.choice.ranks
    if choice.sharded != now.choice.sharded:
        raise BadBundle(f"it is for {_WHAT[choice.sharded]}; here are {_WHAT[not choice.sharded]}")
    if choice.ranks != ranks:
        raise BadBundle(f"it is for {choice.ranks} ranks; here are {ranks}")
    for rank in value.late:
        if rank not in range(ranks):
            raise BadBundle(f"rank {rank} is late in it; ranks are 0 to {ranks - 1}")
        if choice.shares and choice.shares[rank]:
            share = choice.shares[rank] / sum(choice.shares)
            raise BadBundle(f"rank {rank} comes late, and would own {share:.0%} of the gradients")
    value.plan, value.gathering  # noqa: B018  # which proves them


ALL_REDUCE = ValueKind("all-reduce", GroupReduction.from_json, _check_all_reduce)
