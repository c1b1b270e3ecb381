"""Which data-parallel ranks come late to their gradients, and what hosts' ports pass then."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_adaptra.errors import BadInput
from megatron_adaptra.transport.rules import LONGEST_RULE
from megatron_adaptra.units import parse_seconds

FLAG = "--late-rank"
PORTS = "all:5MB/s"  # of a laboratory's hosts, unless it is given
MIN_GAIN = 0.03  # of an iteration: a plan of an all-reduce saves less than one of a pipeline
_SYNTAX = "it has to be a data-parallel rank and how late it comes, such as 2:30ms"
_RULE = re.compile(r"(\d{1,9}):([^:@]+)", re.ASCII)


def parse_late_ranks(given: Sequence[str], replicas: int, longest: float) -> dict[int, float]:
    """By data-parallel rank, the seconds that each of `given`, such as `2:30ms`, names.

    `replicas`: how many there are. `longest`: seconds that no rank may be late by. Raises BadInput.
    """
    late: dict[int, float] = {}
    for text in given:
        if "@" in text:
            when = "--from-iteration and --to-iteration have the period"
            raise BadInput(FLAG, text, f"leave out what begins with @: {when}")
        match = _RULE.fullmatch(text.strip()) if len(text) <= LONGEST_RULE else None
        if match is None:
            raise BadInput(FLAG, text, _SYNTAX)
        rank, seconds = int(match[1]), parse_seconds(match[2], FLAG)
        if replicas == 1:
            raise BadInput(FLAG, text, "it needs several replicas, --data-parallel 4")
        if rank >= replicas:
            allowed = f"no such rank; data-parallel ranks are 0 to {replicas - 1}"
            raise BadInput(FLAG, text, allowed)
        if rank in late:
            raise BadInput(FLAG, ",".join(given), "it has to name each rank only once")
        if not 0 < seconds < longest:
            allowed = f"it has to be above 0, and below the {longest:g} s of --timeout"
            raise BadInput(FLAG, text, allowed)
        late[rank] = seconds
    if late and len(late) == replicas:
        raise BadInput(FLAG, ",".join(given), "at least one rank has to come in time")
    return late
