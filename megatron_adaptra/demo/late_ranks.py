"""Data-parallel ranks that come late to their gradients."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import parse_seconds
from megatron_adaptra.demo.numbered import Numbered

FLAG = "--late-rank"
MIN_GAIN = 0.03  # of an iteration: a plan of an all-reduce saves less than one of a pipeline
_RANKS = Numbered(
    FLAG, re.compile(r"(\d{1,9}):([^:@]+)", re.ASCII),
    "it has to be a data-parallel rank and how late it comes, such as 2:30ms",
    "rank", "data-parallel ranks",
)  # fmt: skip


def parse_late_ranks(given: Sequence[str], replicas: int, longest: float) -> dict[int, float]:
    """Return by data-parallel rank the seconds that each of `given`, such as `2:30ms`, names.

    `replicas`: how many there are. `longest`: seconds that no rank may be late by. Raises BadInput.
    """
    late: dict[int, float] = {}
    each = _RANKS.parsed(given, replicas, lambda rest: parse_seconds(rest, FLAG))
    for text, rank, seconds in each:
        if not 0 < seconds < longest:
            allowed = f"it has to be above 0, and below the {longest:g} s of --timeout"
            raise BadInput(FLAG, text, allowed)
        late[rank] = seconds
    if late and len(late) == replicas:
        raise BadInput(FLAG, ",".join(given), "at least one rank has to come in time")
    return late
